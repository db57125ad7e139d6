// Partition rules of tensor parallelism: how each parameter is cut over the ranks of the axis "tensor", and why.
//
//   const PartitionPlan plan = make_partition_plan(model, {.autotp_size = 4, .preset_model = "llama"});
//   plan.parameters[3].parts[1];  // the slice of the second rank
//
// No process, device, tensor or Group.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/json.h"
#include "trireme/base/tensor_part.h"

namespace trireme {

/// A parameter as its model names it.
struct NamedShape {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<std::string> tied = {};  ///< other names of the same tensor
};

/// The facts of a model that rules need.
struct PartitionModel {
  std::string model_type = {};  ///< of Hugging Face's config.json: "llama"; "": unknown
  int64_t heads = 0;            ///< of queries; 0: unknown, and attention is cut into equal features
  int64_t key_value_heads = 0;  ///< 0: as many as `heads`
  std::vector<NamedShape> parameters = {};
  bool is_ordered = true;  ///< `parameters` are in the order in which their layers run
};

/// How a parameter is cut.
enum class PartitionKind {
  kReplicated,    ///< every rank has all of it
  kColumn,        ///< output features, or heads
  kRow,           ///< input features, or heads
  kPackedColumn,  ///< output features, of each of several concatenated matrices (fused QKV)
  kPackedRow,     ///< likewise along the last dim
  kVocabulary,    ///< tokens: rows of an embedding, outputs of a head
  kEmbedding,     ///< the vectors of an embedding
};
/// The kind in words, such as "column".
const char* name_of(PartitionKind kind) noexcept;

/// A communication of ranks at a layer's input or output.
enum class TensorExchange { kNone, kAllReduce, kGather, kSplit };

/// The exchanges of ranks where a layer uses a parameter.
struct TensorUse {
  std::string name;                                        ///< of the parameter there
  TensorExchange input = TensorExchange::kNone;            ///< of the layer, in forward
  TensorExchange output = TensorExchange::kNone;           ///< of the layer, in forward
  TensorExchange input_gradient = TensorExchange::kNone;   ///< in backward
  TensorExchange output_gradient = TensorExchange::kNone;  ///< in backward
  bool operator==(const TensorUse&) const = default;
};

/// How one parameter is cut, and why.
struct PartitionedParameter {
  std::string name;
  PartitionKind kind = PartitionKind::kReplicated;
  std::vector<TensorPart> parts = {};  ///< by rank; equal for ranks that hold the same heads
  std::vector<TensorUse> uses = {};    ///< one for each of its names
  /// Where ranks hold the same elements, each has a part of their gradient, to be added up; otherwise all of it.
  bool sums_gradient = false;
  std::string rule = {};  ///< source of the rule, and its pattern
  std::string why = {};   ///< a sentence that explains the cut
};

/// How every parameter of a model is cut.
struct PartitionPlan {
  int ranks = 1;
  std::string source;                                 ///< of the rules, such as a preset
  std::vector<PartitionedParameter> parameters = {};  ///< in the model's order
  std::vector<TensorUse> modules = {};                ///< around parameters, by the name that the tp_plan gives them
  std::vector<std::string> notes = {};                ///< rules that are not used
};

/// Entry of `partition_config.layer_specs`.
struct TensorLayerSpec {
  std::vector<std::string> patterns;  ///< regular expressions, from a name's beginning on
  enum class Type { kColumn, kRow, kSkip } type = Type::kColumn;
  /// The sizes, or the number of equal ones, of the matrices in which one dim divides; each of them is cut.
  std::vector<int64_t> sub_sizes = {};
  int64_t sub_count = 0;
  int64_t inputs = -1;                              ///< the other dim of such a weight; -1: any
  std::optional<int> partition_dim = std::nullopt;  ///< default: 0 of columns, 1 of rows
  std::vector<std::string> model_types = {};        ///< empty: of every model
  bool gather_output = false;
  bool grad_allreduce = false;
  bool operator==(const TensorLayerSpec&) const = default;
};

/// DeepSpeed's `partition_config`: its keys and defaults.
struct PartitionConfig {
  std::vector<TensorLayerSpec> layer_specs = {};
  bool use_default_specs = true;    ///< the rules of preset_model, if it is set, follow layer_specs
  bool strict_mode = false;         ///< a matrix without a rule is an error
  int tp_size = 0;                  ///< 0: autotp_size
  int embedding_partition_dim = 1;  ///< 0: tokens, 1: vectors; of a tied embedding always tokens
  std::vector<std::string> lm_head_patterns = {"lm_head", "embed_out"};
  bool operator==(const PartitionConfig&) const = default;
};

/// Throws    ConfigError naming the key: an unknown one, a wrong value, a shape that is none.
PartitionConfig partition_config_from(const Json& json);
/// Every key, spelled out: partition_config_from(to_json(c)) == c.
Json to_json(const PartitionConfig& config);

/// The section `tensor_parallel` of a configuration.
struct TensorParallelOptions {
  int autotp_size = 0;            ///< ranks; 0 and 1: one
  std::string preset_model = {};  ///< whatever its case; "": none
  std::optional<PartitionConfig> partition_config = std::nullopt;
  std::vector<std::pair<std::string, std::string>> tp_plan = {};  ///< module or parameter ("*": a number) to style
  int64_t tp_grain_size = 1;                                      ///< features and tokens are cut at its multiples
  bool sequence_parallel = false;                                 ///< TensorParallel::shard_tokens()
  bool tp_overlap_comm = false;                                   ///< TensorParallel::overlap_sums()
  bool operator==(const TensorParallelOptions&) const = default;
};

/// The values of `preset_model`.
const std::vector<std::string>& preset_names();
/// The styles of a tp_plan that have a meaning here.
const std::vector<std::string>& tp_plan_styles();

/// `model_type` and head counts of a Hugging Face config.json, without parameters.
/// Throws    ConfigError: a head count that is no positive integer.
PartitionModel partition_model_from(const Json& config);

/// Plans the cut of a model. Rules are those of the first that is given: `partition_config`, `tp_plan`, `preset_model`,
/// the preset for `model_type`, heuristics. A parameter that no rule names is replicated, except token embeddings and
/// output heads, which are cut over the vocabulary. Biases follow their weights.
///
/// Ensures   Ranks' parts are a partition of each parameter that is cut, except that ranks which share a key/value head
///           each have all of it. Every rank has a part, and no head is split, except where outputs are gathered. Where
///           the number of heads is unknown, ranks have equal shares; only the run can tell whether heads are whole.
/// Throws    ConfigError: an unknown preset or style; a pattern that is no regular expression or matches nothing; more
///           ranks than heads, features or tokens; sizes that do not fit the heads or the sub-parameters.
PartitionPlan make_partition_plan(const PartitionModel& model, const TensorParallelOptions& options);

/// Each parameter's rule, ranks' slices, exchanges and why, to read.
std::string partition_text(const PartitionPlan& plan);

}  // namespace trireme
