// Where autograd asks what to do with a tensor that it saves for backward.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace trireme::detail {

/// Decides for a thread how tensors are saved.
class SavePolicy {
 public:
  virtual ~SavePolicy() = default;
  /// The hooks of one tensor that is about to be saved.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

/// `policy` decides on this thread while it is the innermost scope. Construct and destroy on the same thread, in any
/// order: the scopes of two engines do not nest.
class [[nodiscard]] SaveScope {
 public:
  explicit SaveScope(SavePolicy& policy);
  ~SaveScope();
  SaveScope(const SaveScope&) = delete;
  SaveScope& operator=(const SaveScope&) = delete;

  /// The policy in force on this thread, or nullptr.
  static SavePolicy* current() noexcept;

 private:
  SavePolicy& policy_;
  SaveScope* outer_;
};

}  // namespace trireme::detail
