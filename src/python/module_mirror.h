// A torch::nn::Module that stands for a Python module: same names, same tensors.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/bindings.h"

namespace trireme::python {

/// Mirrors `module` and the modules in it. Their names (Module::name()) are the Python classes, with the module that
/// they come from. Buffers that are not persistent are left out: they belong to the code, not to the state.
///
/// Requires  the GIL; the Python module keeps its parameters for as long as the mirror is used.
std::shared_ptr<torch::nn::Module> mirror_of(const py::handle& module);

/// mirror_of() that, where `module` has lists of layers (trireme/layers.py), recomputes them as the engine says.
std::shared_ptr<torch::nn::Module> mirror_with_layers(const py::handle& module);

/// The persistent buffers that `module` has now, by name. Requires the GIL.
std::vector<std::pair<std::string, at::Tensor>> persistent_buffers(const py::handle& module);

}  // namespace trireme::python
