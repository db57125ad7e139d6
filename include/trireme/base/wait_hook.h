// A hook that runs while one of the library's threads waits for other ranks; the program that embeds the library sets
// it.
#pragma once

#include <memory>
#include <thread>

namespace trireme {

/// The Python package, for example, releases the GIL and looks for Ctrl-C.
class WaitHook {
 public:
  virtual ~WaitHook() = default;
  /// Called when the calling thread begins a wait that is more than a short spin. The returned object is destroyed when
  /// the wait ends; it may be null.
  virtual std::shared_ptr<void> begin() = 0;
  /// Called about every 20 ms meanwhile. An exception from it ends the wait and makes the group unusable.
  virtual void poll() = 0;
  /// A poll() has thrown, and the caller waits for `thread`, which runs the program: ends what it does soon, if that
  /// can be.
  virtual void interrupt(std::thread::native_handle_type thread) { (void)thread; }
};

/// For all waits of the process that begin from now on; nullptr for none, as at first. Thread-safe.
void set_wait_hook(std::shared_ptr<WaitHook> hook);

/// Lives as long as one wait, on the thread that waits.
class [[nodiscard]] WaitScope {
 public:
  WaitScope();
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;
  void poll() const {
    if (hook_) hook_->poll();
  }
  void interrupt(std::thread::native_handle_type thread) const {
    if (hook_) hook_->interrupt(thread);
  }

 private:
  const std::shared_ptr<WaitHook> hook_;  // shared: a scope may outlive set_wait_hook(nullptr)
  const std::shared_ptr<void> begun_;
};

}  // namespace trireme
