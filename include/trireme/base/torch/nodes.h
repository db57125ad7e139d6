// How autograd holds its nodes: by std::shared_ptr in torch 2.11, by c10::intrusive_ptr in later versions. And nodes of
// our own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace trireme {

/// The pointer by which an edge holds its node.
using NodePtr = decltype(torch::autograd::Edge::function);

inline constexpr bool kNodesAreShared = std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>;

/// A new node of class `Kind`. A long chain of them is freed without a deep stack, as libtorch's own nodes are.
template <class Kind, class... Arguments>
NodePtr make_node(Arguments&&... arguments) {
  if constexpr (kNodesAreShared)  // deleteNode() is found through its argument: later versions have none
    return NodePtr(new Kind(std::forward<Arguments>(arguments)...), [](auto* node) { deleteNode(node); });
  else
    return c10::make_intrusive<Kind>(std::forward<Arguments>(arguments)...);
}

/// Holds `node`, which a graph holds already.
template <class Kind>
NodePtr hold_node(Kind& node) {
  if constexpr (kNodesAreShared)
    return node.shared_from_this();
  else
    return c10::intrusive_ptr<Kind>::reclaim_copy(&node);
}

/// Hands on the gradient.
struct Identity : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
};

/// A tensor with the memory of `data` whose gradient goes to `node`. It is no leaf and no view: a layer may write into
/// it.
inline at::Tensor with_history(const at::Tensor& data, const NodePtr& node) {
  at::Tensor tensor = data.detach();
  torch::autograd::set_history(tensor, node);
  return tensor;
}

/// `leaf` with its memory and its gradient, but no leaf: a layer may write into it.
inline at::Tensor writable(const at::Tensor& leaf) {
  const NodePtr node = make_node<Identity>();
  node->set_next_edges(torch::autograd::collect_next_edges(leaf));
  return with_history(leaf, node);
}

}  // namespace trireme
