// How autograd holds its nodes: by std::shared_ptr in torch 2.11, by c10::intrusive_ptr in later versions.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

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

}  // namespace trireme
