// One rank's parts of a model that is cut into stages.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme {

/// A parameter that layers of several parts share. The first of these parts owns it, the others have copies, also where
/// they are on the same stage.
struct Tie {
  std::string name;                    ///< the owner's, in the whole model
  std::vector<int> parts;              ///< of the model, ascending, the owner's first
  std::vector<at::Tensor> parameters;  ///< by `parts`; undefined where the part is on another stage
};

/// This rank's parts of a model. The parts of all ranks, in order, are the model: each takes what the one before
/// returned, any nesting of tensors (FlatValue), the first one a micro-batch's inputs.
struct StageModel {
  using Part = std::function<c10::IValue(c10::IValue)>;
  /// Outputs of the last part and labels of a micro-batch -> its loss, one floating element.
  using Loss = std::function<at::Tensor(const c10::IValue& outputs, const c10::IValue& labels)>;

  std::shared_ptr<torch::nn::Module> module;  ///< parameters and buffers of the parts, with the whole model's names
  std::vector<Part> parts;                    ///< by chunk
  /// By chunk: the parameters that its part uses; their gradients are reduced only after backward passes of that part.
  /// A parameter that no part names is reduced after every pass. Empty: all are.
  std::vector<std::vector<at::Tensor>> parameters = {};
  Loss loss;                   ///< read where the last part is
  std::vector<Tie> ties = {};  ///< those of the whole model, the same list on every rank
};

}  // namespace trireme
