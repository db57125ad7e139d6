// trireme::zero and the functions on single parameters.
#include "trireme/zero.h"

#include "python/json.h"
#include "python/module_mirror.h"
#include "python/world.h"
#include "trireme/config/config.h"

namespace trireme::python {
namespace {

/// A scope as a Python context manager: made by __enter__, ended by __exit__.
class InitContext {
 public:
  InitContext(std::shared_ptr<WorldHandle> world, zero::InitPolicy policy)
      : world_(std::move(world)), policy_(std::move(policy)) {}
  void enter() { scope_ = std::make_unique<zero::Init>(group_of(*world_), policy_); }
  void exit() { scope_.reset(); }
  int64_t peak_live_bytes() const { return scope_ ? scope_->peak_live_bytes() : 0; }

 private:
  const std::shared_ptr<WorldHandle> world_;
  const zero::InitPolicy policy_;
  std::unique_ptr<zero::Init> scope_;
};

class GatheredContext {
 public:
  GatheredContext(std::vector<at::Tensor> parameters, zero::GatheredOptions options)
      : parameters_(std::move(parameters)), options_(options) {}
  void enter() { scope_ = std::make_unique<zero::GatheredParameters>(parameters_, options_); }
  void exit(bool closes) {
    const auto scope = std::move(scope_);
    if (closes) scope->close();
  }

 private:
  const std::vector<at::Tensor> parameters_;
  const zero::GatheredOptions options_;
  std::unique_ptr<zero::GatheredParameters> scope_;
};

zero::InitPolicy make_policy(const std::optional<Json>& config, int world_size, std::optional<at::ScalarType> dtype,
                             const std::string& remote_device, bool enabled) {
  zero::InitPolicy policy;
  if (config) policy = init_policy(config_from_json(*config, world_size, {}, "zero.Init"));
  if (dtype) policy.dtype = dtype;
  if (!remote_device.empty()) policy.remote_device = remote_device;
  policy.enabled = policy.enabled && enabled;
  return policy;
}

void bind_scopes(py::module_& module) {
  module.def("is_init_open", &zero::Init::is_open, "Whether a zero::Init scope is open in this thread.");
  py::class_<InitContext>(module, "InitContext")
      .def(py::init([](std::shared_ptr<WorldHandle> world, const std::optional<Json>& config,
                       std::optional<at::ScalarType> dtype, const std::string& remote_device, bool enabled) {
             const int size = group_of(*world).size();
             return std::make_unique<InitContext>(std::move(world),
                                                  make_policy(config, size, dtype, remote_device, enabled));
           }),
           py::arg("world"), py::arg("config"), py::arg("dtype"), py::arg("remote_device"), py::arg("enabled"))
      .def("__enter__", &InitContext::enter, WithoutGil())
      .def("__exit__",
           [](InitContext& self, const py::args&) {
             const py::gil_scoped_release no_gil;
             self.exit();
           })
      .def_property_readonly("peak_live_bytes", &InitContext::peak_live_bytes);
  py::class_<GatheredContext>(module, "GatheredContext")
      .def(py::init([](std::vector<at::Tensor> parameters, std::optional<int> modifier_rank) {
             return std::make_unique<GatheredContext>(std::move(parameters),
                                                      zero::GatheredOptions{.modifier_rank = modifier_rank});
           }),
           py::arg("parameters"), py::arg("modifier_rank"))
      .def("__enter__", &GatheredContext::enter, WithoutGil())
      .def("__exit__", [](GatheredContext& self, const py::object& type, const py::object&, const py::object&) {
        const bool closes = type.is_none();
        const py::gil_scoped_release no_gil;
        self.exit(closes);
      });
}

void update_vectorized(const std::vector<at::Tensor>& parameters, const py::function& update) {
  const py::gil_scoped_release no_gil;
  safe_update_full_grad_vectorized(parameters, [&update](const at::Tensor& gradient, const at::Tensor& parameter) {
    const py::gil_scoped_acquire gil;
    return update(gradient, parameter).cast<at::Tensor>();
  });
}

/// A copy of a tensor of a module's state. Collective where an engine manages it.
at::Tensor whole_tensor(const at::Tensor& tensor) {
  return find_managed(tensor) ? whole_weight(tensor) : tensor.detach().clone();
}

void bind_mem_needs(py::module_& module) {
  const auto options = [](int gpus_per_node, int nodes, double factor) {
    return MemNeedsOptions{.num_gpus_per_node = gpus_per_node, .num_nodes = nodes, .additional_buffer_factor = factor};
  };
  module.def("size_of", [](const py::object& model) {
    const ModelSize size = size_of(*mirror_of(model));
    return py::make_tuple(size.total_params, size.largest_layer_params);
  });
  module.def("zero2_mem_needs", [options](int64_t total_params, int gpus_per_node, int nodes, double factor) {
    return estimate_zero2_model_states_mem_needs_all_cold(total_params, options(gpus_per_node, nodes, factor));
  });
  module.def("zero3_mem_needs", [options](int64_t total_params, int64_t largest_layer_params, int gpus_per_node,
                                          int nodes, double factor) {
    return estimate_zero3_model_states_mem_needs_all_cold({total_params, largest_layer_params},
                                                          options(gpus_per_node, nodes, factor));
  });
}

}  // namespace

void bind_zero(py::module_& module) {
  bind_scopes(module);
  bind_mem_needs(module);
  module.def("make_whole", &zero::make_whole, WithoutGil());
  module.def("whole_tensor", &whole_tensor, WithoutGil());
  module.def("safe_get_full_fp32_param", &safe_get_full_fp32_param, WithoutGil());
  module.def("safe_get_full_optimizer_state", &safe_get_full_optimizer_state, WithoutGil());
  module.def("optimizer_state_names", &optimizer_state_names, WithoutGil());
  module.def("step_count", &step_count, WithoutGil());
  module.def("set_step_counts", &set_step_counts, WithoutGil());
  module.def("safe_get_full_grad", &safe_get_full_grad, WithoutGil());
  module.def("safe_set_full_fp32_param", &safe_set_full_fp32_param, WithoutGil());
  module.def("safe_set_full_optimizer_state", &safe_set_full_optimizer_state, WithoutGil());
  module.def("safe_set_full_grad", &safe_set_full_grad, WithoutGil());
  module.def("safe_get_local_fp32_param", &safe_get_local_fp32_param, WithoutGil());
  module.def("safe_get_local_optimizer_state", &safe_get_local_optimizer_state, WithoutGil());
  module.def("safe_get_local_grad", &safe_get_local_grad, WithoutGil());
  module.def("safe_set_local_fp32_param", &safe_set_local_fp32_param, WithoutGil());
  module.def("safe_set_local_optimizer_state", &safe_set_local_optimizer_state, WithoutGil());
  module.def("safe_set_local_grad", &safe_set_local_grad, WithoutGil());
  module.def("safe_update_full_grad_vectorized", &update_vectorized);
}

}  // namespace trireme::python
