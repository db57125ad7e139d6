// How selective recomputation saves one tensor.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

#include "recompute/recipe.h"

namespace trireme::detail {

/// A saved tensor: held, or a claim on a recipe.
class ClaimHooks final : public torch::autograd::SavedVariableHooks {
 public:
  using Choose = std::function<std::unique_ptr<Claim>(const at::Tensor&)>;
  explicit ClaimHooks(Choose choose) : choose_(std::move(choose)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    claim_ = choose_(tensor);
    choose_ = nullptr;
    if (claim_) return;
    // A node's own output, saved with its history, would be a cycle. Version counters are shared.
    held_ = tensor.is_leaf() ? tensor : tensor.detach();
    version_ = static_cast<uint32_t>(tensor._version());
  }

  at::Tensor call_unpack_hook() override {
    if (claim_) return claim_->fetch();
    if (static_cast<uint32_t>(held_._version()) != version_)
      throw RecomputeError(str("selective recomputation: ", held_.toString(), " ", held_.sizes(),
                               ", saved for backward, was written since; write into a clone() of it"));
    return held_;
  }

 private:
  Choose choose_;
  std::unique_ptr<Claim> claim_;
  at::Tensor held_;
  uint32_t version_ = 0;
};

}  // namespace trireme::detail
