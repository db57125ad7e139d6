// A backward pass in two halves: the gradients of the inputs, which the stage before waits for, and those of the
// weights, which nobody does.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <string>
#include <vector>

#include "trireme/base/torch/nodes.h"

namespace trireme {

/// A node behind `outputs` whose backward pass runs one of its own and cannot be split: the name of the first node of
/// reentrant checkpointing. Empty: there is none.
/// Cost      one visit of the graph.
std::string reentrant_node(const torch::autograd::edge_list& outputs);

/// The graph of one micro-batch through one part of a model.
///
/// Where the way to a weight leaves the way to an input, the first half keeps the gradients, and the second half starts
/// there: nothing is computed twice. Activations are freed by the second half.
/// Source    Qi et al. 2023, arXiv:2401.10241, section 2: B and W.
class SplitBackward {
 public:
  using Edges = torch::autograd::edge_list;

  /// `outputs`: of the part, those that have a gradient. `inputs`: the leaves that need one.
  SplitBackward(Edges outputs, const std::vector<at::Tensor>& inputs);

  /// The first half: the gradients of `inputs`, undefined where none reaches one. Once.
  std::vector<at::Tensor> input_gradients(const std::vector<at::Tensor>& output_gradients);

  /// Where the second half starts, and the gradients there.
  struct Rest {
    Edges from;
    std::vector<at::Tensor> gradients;
  };
  /// After input_gradients(). Once: the graph serves nothing else afterwards.
  Rest rest();

 private:
  /// A node at which a way to weights leaves the way to the inputs.
  struct Fork {
    NodePtr node;
    std::vector<size_t> to_inputs;  ///< its next edges that lead to an input
    std::shared_ptr<std::vector<at::Tensor>> gradients;
  };

  Edges outputs_, inputs_;
  std::vector<Fork> forks_;
  Rest rest_;
};

}  // namespace trireme
