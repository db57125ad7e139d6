#include "python/module_mirror.h"

#include <functional>
#include <string>
#include <utility>

namespace trireme::python {
namespace {

class Mirror final : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
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

std::shared_ptr<torch::nn::Module> mirror_of(const py::handle& module) {
  auto mirror = std::make_shared<Mirror>(class_name(module));
  for (const auto& [name, parameter] : module.attr("_parameters").cast<py::dict>()) {
    if (parameter.is_none()) continue;
    const auto tensor = parameter.cast<at::Tensor>();
    mirror->register_parameter(name.cast<std::string>(), tensor, tensor.requires_grad());
  }
  for_each_persistent_buffer(
      module, [&](const std::string& name, at::Tensor buffer) { mirror->register_buffer(name, std::move(buffer)); });
  for (const auto& [name, child] : module.attr("_modules").cast<py::dict>())
    if (!child.is_none()) mirror->register_module(name.cast<std::string>(), mirror_of(child));
  return mirror;
}

std::vector<std::pair<std::string, at::Tensor>> persistent_buffers(const py::handle& module) {
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  append_buffers(module, "", buffers);
  return buffers;
}

}  // namespace trireme::python
