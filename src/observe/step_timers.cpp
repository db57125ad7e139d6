#include "trireme/observe/step_timers.h"

#include <utility>

#include "trireme/base/format.h"

namespace trireme {
namespace {

double ms_of(const Notice& notice) { return notice.duration().count() * 1e3; }

bool reduces(const Notice& wait) {
  return wait.caller == "backward" && (wait.name == "reduce_scatter" || wait.name == "all_reduce");
}

// An instruction of a stage, whose schedule is inside of train_batch(), so that no method is called.
bool is_backward(const Notice& instruction) { return instruction.name.find(", backward") != std::string_view::npos; }

bool ends_windows(std::string_view method) {
  return method == "step" || method == "train_batch" || method == "optimizer.step";
}

}  // namespace

std::string to_text(const StepTimes& times) {
  return formatted("time (ms) | fwd: {:.2f} | bwd: {:.2f} | bwd_inner: {:.2f} | bwd_allreduce: {:.2f} | step: {:.2f}",
                   times.forward_ms, times.backward_ms, times.backward_inner_ms(), times.backward_reduce_ms,
                   times.step_ms);
}

void StepTimers::hear(const Notice& notice) noexcept {
  if (std::this_thread::get_id() != thread_) return;
  switch (notice.kind) {
    case Notice::Kind::kCall:
      return add_call(notice);
    case Notice::Kind::kWait:
      if (reduces(notice)) inside_.backward_reduce_ms += ms_of(notice);
      return;
    case Notice::Kind::kStage:
      if (is_backward(notice)) inside_.backward_ms += ms_of(notice);
      return;
    case Notice::Kind::kWindow:
      inside_.step = notice.number;
      return;
    default:
      return;
  }
}

void StepTimers::add_call(const Notice& call) {
  const StepTimes inside = std::exchange(inside_, {});
  if (call.of != nullptr && model_ != nullptr && call.of != model_) return;
  window_.backward_ms += inside.backward_ms;
  window_.backward_reduce_ms += inside.backward_reduce_ms;
  if (inside.step > 0) window_.step = inside.step;
  if (call.name == "forward") window_.forward_ms += ms_of(call);
  if (call.name == "backward") window_.backward_ms += ms_of(call);
  if (ends_windows(call.name)) window_.step_ms += ms_of(call);
  if (inside.step == 0) return;
  const StepTimes ended = std::exchange(window_, {});
  {
    const std::lock_guard lock(mutex_);
    last_ = ended;
  }
  if (ended_) ended_(ended);
}

std::optional<StepTimes> StepTimers::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

}  // namespace trireme
