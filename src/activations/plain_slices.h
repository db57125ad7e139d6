// Leaves that stay plain tensors of this rank's sizes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

#include "activations/part_nodes.h"

namespace trireme::part_tensor {

/// The plain leaves of all ranks of this process.
class Slices {
 public:
  static Slices& all() {
    static auto* const one = new Slices;  // autograd's threads may outlive every static object
    return *one;
  }

  void add(const at::Tensor& leaf, Known of, std::string name, const void* owner) {
    const std::lock_guard lock(mutex_);
    std::erase_if(slices_, [](const auto& one) { return one.second.tensor.expired(); });
    slices_.insert_or_assign(leaf.unsafeGetTensorImpl(),
                             Slice{Weak(leaf.getIntrusivePtr()), std::move(of), std::move(name), owner, nullptr});
    has_some_ = true;
  }
  /// `copy` shares the data of `leaf`.
  at::Tensor add_copy(const at::TensorBase& leaf, at::Tensor copy) {
    if (!has_some_) return copy;
    std::unique_lock lock(mutex_);
    const auto found = slices_.find(leaf.unsafeGetTensorImpl());
    if (found == slices_.end()) return copy;
    const Slice slice = found->second;
    lock.unlock();
    add(copy, slice.of, slice.name, slice.owner);
    return copy;
  }
  void forget(const void* owner) {
    std::vector<NodePtr> dying;  // they may hold the last reference to a tensor
    const std::lock_guard lock(mutex_);
    std::erase_if(slices_, [&](auto& one) {
      if (one.second.owner != owner) return false;
      dying.push_back(std::move(one.second.told));
      return true;
    });
    has_some_ = !slices_.empty();
  }
  /// The node that a program is told of a leaf; null: `leaf` is none of them.
  const NodePtr* told(const at::TensorBase& leaf);

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Slice {
    Weak tensor;  ///< so its address is no other tensor's
    Known of;
    std::string name;
    const void* owner;
    NodePtr told;
  };
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Slice> slices_;
  std::atomic<bool> has_some_ = false;
};

}  // namespace trireme::part_tensor
