#include "trireme/pipeline/layer_profile.h"

#include <ATen/ops/ones_like.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>

#include "pipeline/kept_random_state.h"
#include "trireme/base/error.h"
#include "trireme/pipeline/values.h"
#include "trireme/schedule/partition.h"

namespace trireme {
namespace {

constexpr int kRepeats = 3;

/// Sums what this thread allocates on the host, less what it frees.
class AllocatedBytes final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*pointer*/, int64_t change, size_t /*total*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    bytes_ += change;
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

/// Inputs that begin a graph of their own.
c10::IValue detached(const c10::IValue& value) {
  FlatValue flat = flatten(value);
  for (at::Tensor& tensor : flat.tensors)
    if (tensor.defined()) tensor = tensor.detach().set_requires_grad(tensor.requires_grad());
  return unflatten(flat);
}

LayerProfile profile_layer(const LayerSpec& spec, torch::nn::Module* module, c10::IValue& value) {
  LayerProfile profile{.seconds = std::numeric_limits<double>::infinity()};
  c10::IValue output;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {  // the first one warms up
    const c10::IValue input = detached(value);
    output = {};
    const auto allocated = std::make_shared<AllocatedBytes>();
    const auto begin = std::chrono::steady_clock::now();
    {
      const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, allocated);
      output = spec.forward(module, input);
    }
    std::vector<at::Tensor> roots, gradients;
    for (const at::Tensor& tensor : flatten(output).tensors) {
      if (!tensor.defined() || !tensor.requires_grad()) continue;
      roots.push_back(tensor);
      gradients.push_back(at::ones_like(tensor));
    }
    if (!roots.empty()) torch::autograd::backward(roots, gradients);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (repeat > 0) profile.seconds = std::min(profile.seconds, took.count());
    profile.activation_bytes = allocated->bytes();
  }
  value = output;
  return profile;
}

}  // namespace

std::vector<LayerProfile> profile_layers(const std::vector<LayerSpec>& layers, const c10::IValue& input) {
  const KeptRandomState kept;
  const at::AutoGradMode with_graph(true);
  std::vector<LayerProfile> profiles;
  std::map<std::string, std::shared_ptr<torch::nn::Module>> tied;
  c10::IValue value = input;
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerSpec& spec = layers[i];
    try {
      const bool is_known = !spec.tie.empty() && tied.contains(spec.tie);
      const auto module = is_known ? tied[spec.tie] : spec.make ? spec.make() : nullptr;
      if (!spec.tie.empty()) tied[spec.tie] = module;
      LayerProfile& profile = profiles.emplace_back(profile_layer(spec, module.get(), value));
      if (!module) continue;
      for (at::Tensor& parameter : module->parameters()) {
        if (!is_known) profile.parameter_bytes += static_cast<int64_t>(parameter.nbytes());
        parameter.mutable_grad().reset();
      }
    } catch (const std::exception& error) {
      throw ConfigError(str("PipelineModule: partition_method 'profile': layer ", i, ", ", spec.type,
                            ", failed on profile_input: ", error.what()));
    }
  }
  return profiles;
}

std::vector<int64_t> partition_profiled(const std::vector<LayerProfile>& profiles,
                                        const PipelineModuleOptions& options) {
  std::vector<int64_t> nanoseconds, bytes;
  for (const LayerProfile& profile : profiles) {
    nanoseconds.push_back(std::llround(profile.seconds * 1e9));
    bytes.push_back(4 * profile.parameter_bytes + options.stages * profile.activation_bytes);
  }
  const int64_t limit = options.memory_limit > 0 ? options.memory_limit / options.chunks : INT64_MAX;
  return pipeline::partition_within(nanoseconds, options.stages * options.chunks, bytes, limit);
}

}  // namespace trireme
