// The forward pass of a micro-batch as a coroutine: a thread that runs only while another one waits for it.
#pragma once

#include <c10/core/Device.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "trireme/base/worker.h"

namespace trireme {

/// One forward pass after the other. Its thread has the thread-local state of libtorch and of the rank that the owner
/// had in start().
class MicroBatchThread {
 public:
  enum class Stop { kTurn, kWait, kEnd };

  explicit MicroBatchThread(c10::Device device);
  ~MicroBatchThread();
  MicroBatchThread(const MicroBatchThread&) = delete;
  MicroBatchThread& operator=(const MicroBatchThread&) = delete;

  // On the owner's thread:

  /// `body` runs in the next go_on().
  void start(std::function<void()> body);
  bool has_ended() const { return body_ == nullptr; }
  /// Lets it run until it stops. Throws what `body` has thrown, which ends it.
  Stop go_on();
  /// Ends `body` by an error in its stop(), whatever it throws then.
  void give_up() noexcept;

  // On its own:

  /// The one whose thread this is; null: none.
  static MicroBatchThread* current() noexcept;
  /// Returns in the next go_on(). Throws StateError: it is given up.
  void stop(Stop why);
  bool is_given_up() const { return is_given_up_; }

 private:
  struct Inherited;
  void serve();
  void run_body();
  void hand_over(std::unique_lock<std::mutex>& lock);

  const c10::Device device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_its_turn_ = false, is_over_ = false;
  bool is_given_up_ = false;
  Stop stop_ = Stop::kEnd;
  std::function<void()> body_;
  std::unique_ptr<Inherited> inherited_;
  const Inherited* begun_ = nullptr;  ///< while the body runs
  std::exception_ptr problem_;
  Worker worker_;
};

}  // namespace trireme
