// How many bytes of model states each rank holds, before anything runs. Pure arithmetic.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "trireme/base/json.h"
#include "trireme/optim/optimizer.h"
#include "trireme/pager/layout/layout.h"

namespace trireme {

/// Model states that a host keeps on disk.
enum class KeptOnDisk : uint8_t {
  kNothing,
  kStates,            ///< masters and optimizer states (Config::disk)
  kStatesAndWeights,  ///< at ZeRO stage 3 the weights, too (PagerPolicy::disk)
};

/// Options of estimate_model_states().
struct EstimateOptions {
  int stage = 0;
  int world = 1;
  at::ScalarType weight_dtype = at::kBFloat16;
  at::ScalarType accumulation_dtype = at::kFloat;
  at::ScalarType update_dtype = at::kFloat;  ///< PrecisionOptions::update_dtype
  OptimizerOptions optimizer = {};
  double offload_ratio = 0;         ///< PagerPolicy::offload_ratio; from ZeRO stage 1 on
  bool offload_parameters = false;  ///< PagerPolicy::offload_parameters; at ZeRO stage 3
  KeptOnDisk on_disk = KeptOnDisk::kNothing;
};

/// Bytes on the rank that holds most: on its device, and in `host_bytes` what is offloaded to the host.
struct ModelStates {
  int64_t weight_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t master_bytes = 0;     ///< fp32 copies of 16-bit weights
  int64_t optimizer_bytes = 0;  ///< Adam: two fp32 moments
  int64_t host_bytes = 0;       ///< all that is offloaded; no part of the others
  int64_t disk_bytes = 0;       ///< all that is on disk; no part of the others
  int64_t snapshot_bytes = 0;   ///< with checkpoint.async_save, besides: 1/N of weights, masters and optimizer states
  int64_t total() const { return weight_bytes + gradient_bytes + master_bytes + optimizer_bytes; }
  bool operator==(const ModelStates&) const = default;
};

/// The memory of `parameters` trainable elements, without padding. With N ranks, w bytes per weight, g per gradient
/// (the accumulation dtype) and s for master and optimizer together (Adam: 12 in bf16, 8 in fp32), the bytes per
/// parameter are
///   ZeRO 0: w + g + s    ZeRO 1: w + g + s/N    ZeRO 2: w + (g + s)/N    ZeRO 3: (w + g + s)/N.
/// An offloaded parameter has (w + g + s)/N on the host, and on the device w, at ZeRO 3 w/N; with offload_parameters at
/// ZeRO 3 it has nothing on the device. With offloading ZeRO 1 shards the gradients of the other parameters too, as
/// ZeRO 2 does. On disk are s bytes, or s/N, and at ZeRO 3 with weights w/N more. Units gathered for computing,
/// activations and gradients in flight come on top: docs/plan.md.
///
/// Throws    ConfigError: a negative count, a stage outside 0-3, a world below 1, a ratio outside 0-1; offloading
///           from a device beside states on disk.
/// Source    "P_os, P_os+g, P_os+g+p" of ZeRO, arXiv:1910.02054, section 5. Test: estimate_test.cpp.
ModelStates estimate_model_states(int64_t parameters, const EstimateOptions& options);

/// The same, exactly: padding included, frozen parameters without gradients and states. World and weight dtypes are the
/// layout's.
ModelStates estimate_model_states(const Layout& layout, const EstimateOptions& options);

/// Which combinations a table shows: all stages for each of these.
struct EstimateRequest {
  std::vector<int> worlds = {1, 2, 4, 8, 16, 64};
  std::vector<at::ScalarType> accumulation_dtypes = {at::kFloat,
                                                     at::kBFloat16};  ///< those narrower than the weights are left out
  at::ScalarType weight_dtype = at::kBFloat16;
  at::ScalarType update_dtype = at::kFloat;  ///< as in EstimateOptions
  OptimizerOptions optimizer = {};
  double offload_ratio = 0;         ///< as in EstimateOptions
  bool offload_parameters = false;  ///< as in EstimateOptions
  KeptOnDisk on_disk = KeptOnDisk::kNothing;
};

/// The estimate for one world and accumulation dtype.
struct EstimateRow {
  int world = 1;
  at::ScalarType accumulation_dtype = at::kFloat;
  std::vector<ModelStates> by_stage;  ///< [4]
};

/// A table of estimates.
struct Estimate {
  int64_t parameters = 0;
  EstimateRequest request;
  std::vector<EstimateRow> rows;
};

/// For a number of parameters.
Estimate estimate(int64_t parameters, const EstimateRequest& request);

/// For a model's own parameters, laid out by `rules` for every world; their dtypes count, not the request's.
Estimate estimate(const std::vector<ParameterSpec>& parameters, const EstimateRequest& request,
                  const UnitRules& rules = {});

/// A table to read, in the decimal unit (MB, GB, TB) that fits the largest figure: 7.5e9 parameters on 64 ranks with
/// bf16 accumulation are 120, 31.4, 16.6 and 1.9 GB.
std::string to_table(const Estimate& estimate);

/// The parts of one stage, 0 to 3: weights, gradients, masters, optimizer states.
std::string to_table(const Estimate& estimate, int stage);

/// The same for programs, in bytes.
Json to_json(const Estimate& estimate);

}  // namespace trireme
