// Times of forward, backward and step of each accumulation window.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "trireme/base/notices.h"

namespace trireme {

/// Milliseconds of the host in one accumulation window, all micro-batches together. Work that a device still does then
/// counts where the host waits for it.
struct StepTimes {
  int64_t step = 0;  ///< optimizer steps, this one included
  double forward_ms = 0;
  double backward_ms = 0;
  double backward_reduce_ms = 0;  ///< of backward_ms: what the program's thread waited for reductions of gradients
  double step_ms = 0;             ///< the method that ends the window; a pipeline's train_batch() has all in it
  double backward_inner_ms() const { return backward_ms - backward_reduce_ms; }
};

/// "time (ms) | fwd: 12.30 | bwd: 24.51 | bwd_inner: 20.10 | bwd_allreduce: 4.41 | step: 8.02", as DeepSpeed has it.
std::string to_text(const StepTimes& times);

/// Hears the thread that made it, of the methods of one model. Calls `ended` on it after each window.
class StepTimers final : public NoticeListener {
 public:
  using Ended = std::function<void(const StepTimes&)>;
  explicit StepTimers(Ended ended) : ended_(std::move(ended)) {}

  /// From here on only methods of `model` (Notice::of) count, and those of no single one. Before the first method.
  void follow(const void* model) { model_ = model; }
  void hear(const Notice& notice) noexcept override;
  /// The times of the last window that ended; nothing before that.
  std::optional<StepTimes> last() const;

 private:
  void add_call(const Notice& call);

  const std::thread::id thread_ = std::this_thread::get_id();
  const Ended ended_;
  // Members of thread_ alone:
  const void* model_ = nullptr;
  StepTimes window_;
  StepTimes inside_;  // of the method that runs, whose model is told at its end
  mutable std::mutex mutex_;
  std::optional<StepTimes> last_;  // guarded by mutex_
};

}  // namespace trireme
