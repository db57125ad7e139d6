// DeepSpeed's estimates of model states, under its names, followed by this engine's own figure.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme {

/// Names and defaults are DeepSpeed's.
struct MemNeedsOptions {
  int num_gpus_per_node = 1;
  int num_nodes = 1;
  double additional_buffer_factor = 1.5;  ///< multiplies host memory, for buffers and fragmentation
};

/// The sizes by which a model's memory is estimated: a tied parameter counts once.
struct ModelSize {
  int64_t total_params = 0;
  int64_t largest_layer_params = 0;  ///< of one module itself, without the modules in it
};
ModelSize size_of(const torch::nn::Module& module);

/// The table that DeepSpeed prints, as text: bytes (in units of 2^30, as there) that a rank's device and a host's
/// memory need by DeepSpeed's rules for each way to offload, then what a rank of this engine holds (16-bit weights,
/// Adam, fp32 accumulation; host memory).
///
/// Throws    ConfigError: a negative count, fewer than 1 host or rank of a host, a factor that is not above 0.
/// Source    the formulas of DeepSpeed's estimate_zero2/3_model_states_mem_needs. Test: mem_needs_test.cpp.
std::string estimate_zero2_model_states_mem_needs_all_cold(int64_t total_params, const MemNeedsOptions& options = {});
std::string estimate_zero2_model_states_mem_needs_all_live(const torch::nn::Module& module,
                                                           const MemNeedsOptions& options = {});
std::string estimate_zero3_model_states_mem_needs_all_cold(const ModelSize& size, const MemNeedsOptions& options = {});
std::string estimate_zero3_model_states_mem_needs_all_live(const torch::nn::Module& module,
                                                           const MemNeedsOptions& options = {});

}  // namespace trireme
