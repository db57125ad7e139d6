// Where autograd asks what to do with a tensor that it saves for backward.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace trireme::detail {

/// Decides for a thread how tensors are saved.
class SavePolicy {
 public:
  virtual ~SavePolicy() = default;
  /// The hooks of one tensor that is about to be saved; null leaves it to the scope around, where may_decline().
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
  virtual bool may_decline() const { return false; }
};

/// `policy` decides on this thread while scopes inside of this one decline. Construct and destroy on the same thread,
/// in any order: the scopes of two engines do not nest.
class [[nodiscard]] SaveScope {
 public:
  explicit SaveScope(SavePolicy& policy);
  ~SaveScope();
  SaveScope(const SaveScope&) = delete;
  SaveScope& operator=(const SaveScope&) = delete;

  /// Those of the innermost policy of this thread that does not decline; null: there is none.
  static std::unique_ptr<torch::autograd::SavedVariableHooks> hooks();
  /// Whether `policy` is asked on this thread: all scopes inside of its own may decline.
  static bool reaches(const SavePolicy& policy) noexcept;

 private:
  SavePolicy& policy_;
  SaveScope* outer_;
};

}  // namespace trireme::detail
