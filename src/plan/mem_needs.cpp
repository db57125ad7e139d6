#include "trireme/plan/mem_needs.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/plan/estimate.h"

namespace trireme {
namespace {

constexpr double kGiB = 1 << 30;

/// Bytes; the host's are those of all its ranks.
struct Needs {
  double host = 0;
  double device = 0;
};

struct Model {
  double params;
  double largest_layer;
};

struct Setup {
  explicit Setup(const MemNeedsOptions& options)
      : per_node(options.num_gpus_per_node), nodes(options.num_nodes), factor(options.additional_buffer_factor) {}
  double per_node;
  double nodes;
  double factor;
  double ranks() const { return per_node * nodes; }
};

void check(const ModelSize& size, const MemNeedsOptions& options) {
  const auto refuse = [](const char* name, auto value, const char* fix) {
    throw ConfigError(str("model states mem needs: ", name, "=", value, "; use ", fix));
  };
  if (size.total_params < 0) refuse("total_params", size.total_params, "0 or more");
  if (size.largest_layer_params < 0) refuse("largest_layer_params", size.largest_layer_params, "0 or more");
  if (options.num_gpus_per_node < 1) refuse("num_gpus_per_node", options.num_gpus_per_node, "1 or more");
  if (options.num_nodes < 1) refuse("num_nodes", options.num_nodes, "1 or more");
  if (!(options.additional_buffer_factor > 0))
    refuse("additional_buffer_factor", options.additional_buffer_factor, "a number above 0");
}

// Bytes per parameter: 2 a 16-bit weight, 4 its gradient's or the initial model's, 16 and 18 all of its states.
Needs zero2(const Model& model, const Setup& setup, bool offloads_optimizer) {
  if (offloads_optimizer) return {model.params * std::max(4 * setup.ranks(), 16.0) * setup.factor, 2 * model.params};
  return {model.params * 4 * setup.per_node * setup.factor, 4 * model.params + 16 * model.params / setup.ranks()};
}

enum class Offload { kNothing, kOptimizer, kAll };

Needs zero3(const Model& model, const Setup& setup, Offload offload, bool zero_init) {
  const double gathered = 4 * model.largest_layer;  // one layer, with its gradients, is whole
  const double initial = 4 * setup.per_node;        // every rank of a host constructs the whole model in fp32
  if (offload == Offload::kNothing) {
    const double host = zero_init ? model.largest_layer : model.params;
    return {host * initial * setup.factor, gathered + 18 * model.params / setup.ranks()};
  }
  const double states = (offload == Offload::kAll ? 18 : 16) / setup.nodes;
  const double host = model.params * (zero_init ? states : std::max(initial, states)) * setup.factor;
  return {host, offload == Offload::kAll ? gathered : gathered + 2 * model.params / setup.ranks()};
}

std::string head(const MemNeedsOptions& options, const std::string& model) {
  const auto plural = [](int count) { return count > 1 ? "s" : ""; };
  return str("Estimated memory needed for params, optim states and gradients for a:\nHW: Setup with ",
             options.num_nodes, " node", plural(options.num_nodes), ", ", options.num_gpus_per_node, " GPU",
             plural(options.num_gpus_per_node), " per node.\nSW: Model with ", model,
             ".\n  per CPU  |  per GPU |   Options\n");
}

std::string row(const Needs& needs, const std::string& options) {
  return formatted(" {:7.2f}GB | {:6.2f}GB | {}\n", needs.host / kGiB, needs.device / kGiB, options);
}

std::string own_row(int64_t params, int stage, const MemNeedsOptions& options) {
  const int ranks = options.num_nodes * options.num_gpus_per_node;
  const ModelStates states = estimate_model_states(params, {.stage = stage, .world = ranks});
  return formatted("Trireme, stage {}, on each of {} ranks, in host memory: {:.2f}GB\n", stage, ranks,
                   static_cast<double>(states.total()) / kGiB);
}

std::string millions(int64_t count) { return str(count / 1'000'000, "M"); }

}  // namespace

ModelSize size_of(const torch::nn::Module& module) {
  ModelSize size;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : module.parameters())
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) size.total_params += parameter.numel();
  for (const auto& layer : module.modules(/*include_self=*/false)) {
    int64_t params = 0;
    for (const at::Tensor& parameter : layer->parameters(/*recurse=*/false)) params += parameter.numel();
    size.largest_layer_params = std::max(size.largest_layer_params, params);
  }
  int64_t own = 0;
  for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) own += parameter.numel();
  size.largest_layer_params = std::max(size.largest_layer_params, own);
  return size;
}

std::string estimate_zero2_model_states_mem_needs_all_cold(int64_t total_params, const MemNeedsOptions& options) {
  check({.total_params = total_params}, options);
  const Model model{static_cast<double>(total_params), 0};
  const Setup setup(options);
  return head(options, millions(total_params) + " total params") +
         row(zero2(model, setup, true), "offload_optimizer=cpu ") +
         row(zero2(model, setup, false), "offload_optimizer=none") + own_row(total_params, 2, options);
}

std::string estimate_zero2_model_states_mem_needs_all_live(const torch::nn::Module& module,
                                                           const MemNeedsOptions& options) {
  return estimate_zero2_model_states_mem_needs_all_cold(size_of(module).total_params, options);
}

std::string estimate_zero3_model_states_mem_needs_all_cold(const ModelSize& size, const MemNeedsOptions& options) {
  check(size, options);
  const Model model{static_cast<double>(size.total_params), static_cast<double>(size.largest_layer_params)};
  const Setup setup(options);
  std::string table = head(options, str(millions(size.total_params), " total params, ",
                                        millions(size.largest_layer_params), " largest layer params"));
  for (const Offload offload : {Offload::kAll, Offload::kOptimizer, Offload::kNothing})
    for (const bool zero_init : {true, false})
      table +=
          row(zero3(model, setup, offload, zero_init),
              str("offload_param=", offload == Offload::kAll ? "cpu " : "none",
                  ", offload_optimizer=", offload == Offload::kNothing ? "none" : "cpu ", ", zero_init=", zero_init));
  return table + own_row(size.total_params, 3, options);
}

std::string estimate_zero3_model_states_mem_needs_all_live(const torch::nn::Module& module,
                                                           const MemNeedsOptions& options) {
  return estimate_zero3_model_states_mem_needs_all_cold(size_of(module), options);
}

}  // namespace trireme
