// What a module holds: its parameters and buffers, each once.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "trireme/pager/pager.h"
#include "trireme/precision/precision.h"

namespace torch::nn {
class Module;
}

namespace trireme {

struct NamedBuffer {
  std::string name;
  at::Tensor tensor;
};

struct ModuleTensors {
  std::vector<NamedParameter> parameters;      ///< in the module's order; a tied one under its first name
  std::map<std::string, std::string> aliases;  ///< other name of a tied parameter -> first name
  std::vector<NamedBuffer> buffers;
};

/// Lists the tensors of `module`, then casts the floating ones to the weight dtype and makes all contiguous, in place:
/// the module keeps its tensor objects.
///
/// Throws    ConfigError, before anything is changed, that names a parameter which is off the host, not dense or of a dtype that
///           cannot be trained, and every two different tensors that share one storage.
ModuleTensors take_tensors(torch::nn::Module& module, const PrecisionOptions& precision);

}  // namespace trireme
