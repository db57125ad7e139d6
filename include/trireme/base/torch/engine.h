// An autograd engine in front of the one that was there before.
#pragma once

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <memory>
#include <utility>
#include <vector>

#include "trireme/base/torch/nodes.h"

namespace trireme {

/// Hands every call on to `real`. A virtual function that a later libtorch adds must be handed on too: what Python
/// answers to it would be lost in silence.
class ForwardingEngine : public torch::autograd::Engine {
 public:
  explicit ForwardingEngine(Engine& real) : real_(real) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return real_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, NodePtr root,
      torch::autograd::InputBuffer&& buffer) override {
    return real_.execute_with_graph_task(task, std::move(root), std::move(buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return real_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return real_.get_default_saved_variable_hooks();
  }
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)  // not in torch 2.11
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks() override {
    return real_.get_node_creation_hooks();
  }
#endif

 private:
  Engine& real_;
};

}  // namespace trireme
