// A hook that runs while one of the library's threads waits for other ranks; the library's host sets it.
#pragma once

#include <memory>

namespace trireme {

/// Python, for example, lets its lock go, and looks for Ctrl-C.
class WaitHook {
 public:
  virtual ~WaitHook() = default;
  /// A wait of the calling thread begins that is longer than a moment; it ends with what is returned (null: nothing to
  /// end).
  virtual std::shared_ptr<void> begin() = 0;
  /// Called every 20 ms or so in between. What it throws ends the wait, and with it the group that was waited in.
  virtual void poll() = 0;
};

/// For all waits of the process that begin from now on; nullptr for none, as at first. Thread-safe.
void set_wait_hook(std::shared_ptr<WaitHook> hook);

/// A wait: made where it begins, on the thread that waits.
class [[nodiscard]] WaitScope {
 public:
  WaitScope();
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;
  void poll() const {
    if (hook_) hook_->poll();
  }

 private:
  const std::shared_ptr<WaitHook> hook_;  // shared: a scope may outlive set_wait_hook(nullptr)
  const std::shared_ptr<void> begun_;
};

}  // namespace trireme
