#include "python/module_mirror.h"

#include <functional>
#include <string>
#include <utility>

#include "trireme/recompute/recompute.h"

namespace trireme::python {
namespace {

class Mirror : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
};

/// The mirror of a model with layers.
class LayeredMirror final : public Mirror, public RecomputesLayers {
 public:
  LayeredMirror(const std::string& name, py::object module) : Mirror(name), module_(shared(std::move(module))) {}
  void recompute_layers(bool on) override {
    const py::gil_scoped_acquire gil;
    py::module_::import("trireme.layers").attr("recompute_layers")(*module_, on);
  }

 private:
  const std::shared_ptr<py::object> module_;
};

std::string class_name(const py::handle& module) {
  const py::handle type = py::type::handle_of(module);
  return py::str(type.attr("__module__")).cast<std::string>() + "." +
         py::str(type.attr("__qualname__")).cast<std::string>();
}

/// Visits the name and the tensor of each persistent buffer that `module` holds itself.
void for_each_persistent_buffer(const py::handle& module,
                                const std::function<void(const std::string&, at::Tensor)>& visit) {
  const py::object not_persistent = module.attr("_non_persistent_buffers_set");
  for (const auto& [name, buffer] : module.attr("_buffers").cast<py::dict>())
    if (!buffer.is_none() && !not_persistent.contains(name)) visit(name.cast<std::string>(), buffer.cast<at::Tensor>());
}

void append_buffers(const py::handle& module, const std::string& prefix,
                    std::vector<std::pair<std::string, at::Tensor>>& buffers) {
  for_each_persistent_buffer(module, [&](const std::string& name, at::Tensor buffer) {
    buffers.emplace_back(prefix + name, std::move(buffer));
  });
  for (const auto& [name, child] : module.attr("_modules").cast<py::dict>())
    if (!child.is_none()) append_buffers(child, prefix + name.cast<std::string>() + ".", buffers);
}

}  // namespace

namespace {

void fill(torch::nn::Module& mirror, const py::handle& module) {
  for (const auto& [name, parameter] : module.attr("_parameters").cast<py::dict>()) {
    if (parameter.is_none()) continue;
    const auto tensor = parameter.cast<at::Tensor>();
    mirror.register_parameter(name.cast<std::string>(), tensor, tensor.requires_grad());
  }
  for_each_persistent_buffer(
      module, [&](const std::string& name, at::Tensor buffer) { mirror.register_buffer(name, std::move(buffer)); });
  for (const auto& [name, child] : module.attr("_modules").cast<py::dict>())
    if (!child.is_none()) mirror.register_module(name.cast<std::string>(), mirror_of(child));
}

}  // namespace

std::shared_ptr<torch::nn::Module> mirror_of(const py::handle& module) {
  auto mirror = std::make_shared<Mirror>(class_name(module));
  fill(*mirror, module);
  return mirror;
}

std::shared_ptr<torch::nn::Module> mirror_with_layers(const py::handle& module) {
  const auto layers = py::module_::import("trireme.layers").attr("layers_of")(module);
  if (py::len(layers) == 0) return mirror_of(module);
  auto mirror = std::make_shared<LayeredMirror>(class_name(module), py::reinterpret_borrow<py::object>(module));
  fill(*mirror, module);
  return mirror;
}

std::vector<std::pair<std::string, at::Tensor>> persistent_buffers(const py::handle& module) {
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  append_buffers(module, "", buffers);
  return buffers;
}

}  // namespace trireme::python
