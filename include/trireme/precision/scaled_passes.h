// A check that a backward pass began at a loss that was multiplied by the loss scale.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

namespace trireme {

/// Marks backward passes as scaled.
class ScaledPasses {
 public:
  /// Returns `scaled`: a backward pass through it counts as scaled until the pass ends.
  at::Tensor mark(at::Tensor scaled) const;

  /// Every backward pass while one lives counts as scaled.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const ScaledPasses& passes)
        : is_scaled_(passes.is_scaled_), outer_(std::exchange(*is_scaled_, true)) {}
    ~Scope() { *is_scaled_ = outer_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const std::shared_ptr<bool> is_scaled_;
    const bool outer_;
  };

  /// Whether the backward pass that runs now counts as scaled.
  bool is_scaled() const { return *is_scaled_; }

 private:
  // Hooks of the user's graph hold it, and may outlive the engine.
  std::shared_ptr<bool> is_scaled_ = std::make_shared<bool>(false);
};

}  // namespace trireme
