// Pairs of features that exclude each other, as rows. Whoever refuses a pair takes the text from its row, and
// tests/compose takes the pairs that it expects to be refused from here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/error.h"

namespace trireme {

struct AxisExclusion;
struct AxisPart;
struct ParallelOptions;

/// A feature that cannot be combined with every other one.
enum class Feature : uint8_t {
  kUnsharded,           ///< ZeRO stage 0
  kSharedGather,        ///< GatherPolicy::kShared
  kReplicas,            ///< of sharded model states: MiCS, HSDP
  kStatesOverReplicas,  ///< hpZ
  kDeterministic,
  kOffload,
  kStatesOnDisk,
  kWeightsOnDisk,
  kPipeline,
  kOwnership,  ///< a step function over stages that own parts of a model
  kSequence,
  kTensor,
  kProgramSlices,        ///< layers that the program has cut itself
  kShardedTokens,        ///< tensor_parallel.sequence_parallel
  kAnySizes,             ///< a program that may read sizes of other tensors than its inputs
  kOwnershipOfAnySizes,  ///< such a program over stages that own parts of its model
  kRingAttention,
  kDevice,          ///< parameters on a GPU
  kSeparateMemory,  ///< ranks that do not share memory
  kNoSync,
  kCoalesced,  ///< coalesce_grad_reduction()
  kRecomputeByCall,
  kRecomputeLayers,
  kLeafModules,
  kParameterGroups,
  kClientOptimizer,
  kMatrixOptimizer,  ///< one that looks at whole parameters: Lamb, Muon
  kInit,             ///< parameters that zero::Init has sharded
};

/// Calls of a run, in their order.
enum class EngineCall : uint8_t { kInitialize, kForward, kBackward, kStep };

/// A row: a pair that is refused.
struct Exclusion {
  Feature one, other;
  std::string text;                   ///< of the error; "{}" where it has a value of the run (base/pattern.h)
  std::optional<EngineCall> at = {};  ///< the call that refuses; nothing: options alone decide, before all calls
  ErrorCode code = ErrorCode::kUnsupported;
};

inline constexpr const char* kNoScope =
    "no_sync(), coalesce_grad_reduction(): a schedule says when gradients are reduced, so a PipelineEngine has no such "
    "scope";
inline constexpr const char* kNoScopeInSteps =
    "no_sync(), coalesce_grad_reduction(): a schedule says when gradients are reduced, so a step function over stages "
    "has no such scope; call it once for each part of a batch, with more micro-batches";
/// The text of a row whose error has other causes too.
inline constexpr const char* kNoLayers =
    "`trireme.recompute` = \"full\": module '{}' does not say where its layers begin: it has no list of modules of one "
    "class (Python), or does not derive from trireme::RecomputesLayers (C++); write \"selective\"; or write "
    "\"none\" and call trireme::recompute() or trireme.checkpointing.checkpoint() around its layers, or set "
    "`pipeline.activation_checkpoint_interval` where it is a PipelineModule";

/// All rows, of axes first; those that options alone decide stand in the order in which they are checked.
const std::vector<Exclusion>& exclusions();

/// The row of two features, in any order; null: they can be combined.
const Exclusion* find_exclusion(Feature one, Feature other);
/// The same. Requires  there is one.
const Exclusion& exclusion_of(Feature one, Feature other);

/// The first row of an axis longer than 1 that options alone decide and that holds; null: none.
const AxisExclusion* first_exclusion(const AxisPart& axis, const ParallelOptions& options);

}  // namespace trireme
