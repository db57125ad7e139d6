// The tensors that a module holds: its parameters and buffers, each once.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "trireme/pager/pager.h"
#include "trireme/precision/precision.h"
#include "trireme/step/buffers.h"

namespace torch::nn {
class Module;
}

namespace trireme {

using PresentBuffers = std::vector<std::pair<std::string, at::Tensor>>;

struct ModuleTensors {
  std::vector<NamedParameter> parameters;      ///< in the module's order; a tied one under its first name
  std::map<std::string, std::string> aliases;  ///< other name of a tied parameter -> first name
  std::vector<NamedBuffer> buffers;
};

/// Lists the tensors of `module`, without the parameters in `unmanaged`, and changes nothing.
///
/// Throws    ConfigError that names a parameter which is on meta, not dense or of a dtype that cannot be trained, and
///           every two different tensors that share one storage.
ModuleTensors list_tensors(torch::nn::Module& module, const PrecisionOptions& precision,
                           const std::set<std::string>& unmanaged = {});

/// The dtype that `parameter` is to have: the weights' of `precision`, or its own where these are fp32.
at::ScalarType dtype_of_weight(const at::Tensor& parameter, const PrecisionOptions& precision);

/// Casts the parameters to dtype_of_weight() and floating buffers to buffer_dtype where there is one, drops gradients
/// and makes all contiguous, in place: the module keeps its tensor objects.
void cast_tensors(const ModuleTensors& tensors, const PrecisionOptions& precision);

using TensorSet = std::unordered_set<const void*>;  ///< of TensorImpl
TensorSet parameters_of(const ModuleTensors& tensors);

/// The buffers that a module has now, each once, contiguous: those of `all`, without undefined ones and `parameters`
/// that are registered as a buffer, too.
///
/// Throws    StateError that names a buffer which is on meta, not dense, or a view of memory that is managed.
std::vector<NamedBuffer> present_buffers(const PresentBuffers& all, const TensorSet& parameters);

/// The present buffers of `module` by its own list.
PresentBuffers buffers_of(const torch::nn::Module& module);

}  // namespace trireme
