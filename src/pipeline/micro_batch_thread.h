// The forward pass of a micro-batch as a coroutine: a thread that runs only while another one waits for it.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

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
  /// Lets it run until it stops. Throws what `body` has thrown, which ends it. Where the program is interrupted, so is
  /// `body`; one that does not end soon then, as it sleeps, is left: it runs on, and this must not be destroyed.
  Stop go_on();
  /// Ends `body`, unless it is left, by an error in its stop(), whatever it throws then.
  void give_up() noexcept;
  bool is_left() const { return is_left_; }

  // On its own:

  /// The one whose thread this is; null: none.
  static MicroBatchThread* current() noexcept;
  /// Returns in the next go_on(); never, where it is left. Throws StateError: it is given up.
  void stop(Stop why);
  /// Ends the run of a thread that is left: what its callers have in use is gone.
  void stay_if_left();
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
  std::atomic<bool> is_left_ = false;
  std::thread::native_handle_type handle_ = {};
  Stop stop_ = Stop::kEnd;
  std::function<void()> body_;
  std::unique_ptr<Inherited> inherited_;
  const Inherited* begun_ = nullptr;  ///< while the body runs
  std::exception_ptr problem_;
  Worker worker_;
};

}  // namespace trireme
