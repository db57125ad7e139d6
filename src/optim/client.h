// Any torch::optim::Optimizer over this rank's parts of parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "trireme/optim/options.h"

namespace torch::optim {
class OptimizerParamState;
}

namespace trireme {

/// A state of one part, as the optimizer serialises it.
struct ClientState {
  size_t part = 0;
  std::string name;
  at::Tensor tensor;  ///< [numel of the part]
};

class ClientOptimizer {
 public:
  /// Lets `factory` make an optimizer of `parts`, flat fp32 tensors that are updated in place; `names` is for errors.
  ///
  /// Throws    ConfigError: not an optimizer of just these tensors, or one that needs a closure.
  ClientOptimizer(const ClientOptimizerFactory& factory, std::vector<at::Tensor> parts, std::vector<std::string> names);
  ~ClientOptimizer();

  std::vector<double> learning_rates() const;  ///< by the optimizer's own parameter group
  /// One step; a part with an undefined gradient is not updated.
  void step(const std::vector<at::Tensor>& gradients, const std::vector<double>& learning_rates);

  /// Copies of every part's states, zeros where the optimizer has made none yet.
  ///
  /// Throws    CheckpointError: a state that is neither of its part's shape nor the count of steps, named.
  std::vector<ClientState> states();
  /// Takes over states that were loaded, and the steps of each part; a part without steps keeps what it has.
  void set_states(const std::vector<ClientState>& states, const std::vector<int64_t>& steps);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
