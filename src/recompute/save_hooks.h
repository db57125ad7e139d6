// Where autograd asks what to do with a tensor that it saves for backward.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstdint>
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

/// `policy` decides on this thread while scopes inside of this one decline, and libtorch has no hooks that came later,
/// such as those of torch.utils.checkpoint: what is innermost decides. Construct and destroy on the same thread,
/// in any order: the scopes of two engines do not nest.
class [[nodiscard]] SaveScope {
 public:
  explicit SaveScope(SavePolicy& policy);
  ~SaveScope();
  SaveScope(const SaveScope&) = delete;
  SaveScope& operator=(const SaveScope&) = delete;

  /// Those of the innermost policy of this thread that does not decline; null: there is none, or libtorch's are later.
  static std::unique_ptr<torch::autograd::SavedVariableHooks> hooks();
  /// Whether `policy` is asked on this thread: all scopes inside of its own may decline.
  static bool reaches(const SavePolicy& policy) noexcept;
  /// The innermost scope of this thread, and its replacement: for threads that work for the same rank.
  static SaveScope* of_this_thread() noexcept;
  static void decide_here(SaveScope* scope) noexcept;

 private:
  friend class SaveMoment;
  SavePolicy& policy_;
  SaveScope* outer_;
  const uint64_t serial_;
  const size_t hooks_around_;  ///< libtorch's, that were there before
};

/// The hooks on saved tensors of a moment: libtorch's, which Python sets, and the scopes above.
class SaveMoment {
 public:
  SaveMoment();  ///< now

  /// Whether this thread has hooks or scopes that do not decline, and that came later.
  bool has_later() const;

  /// While it lives, this thread saves tensors as at the moment: later hooks and scopes do not see them. Those that
  /// have ended since do not, either.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const SaveMoment& moment);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const at::impl::SavedTensorDefaultHooksTLS outer_hooks_;
    const uint64_t outer_last_;
  };

 private:
  at::impl::SavedTensorDefaultHooksTLS hooks_;
  uint64_t last_;  ///< the newest scope of any thread
};

}  // namespace trireme::detail
