// The listeners that a configuration asks for.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>

#include "trireme/base/notices.h"
#include "trireme/observe/comms_log.h"
#include "trireme/observe/options.h"
#include "trireme/observe/step_timers.h"
#include "trireme/observe/timeline.h"

namespace trireme {

/// The log of rank `rank` of the world in this process, which counts where `options.enabled`. It is one for all
/// engines of the rank and stays, with what it has counted, until the process ends.
std::shared_ptr<CommsLog> configure_comms_log(int rank, const CommsLoggerOptions& options);
/// The same as it is; null: it was never configured.
std::shared_ptr<CommsLog> comms_log_of(int rank);

/// The listeners of one training; they end with it. Where several trainings of a rank ask for a timeline, it is one.
class Observation {
 public:
  /// `rank` in the world; `device` of the model. Throws IoError: the timeline's folder or file cannot be made.
  Observation(const ObserveOptions& options, int rank, c10::Device device);
  ~Observation();
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

  /// The model whose methods step_times() are of, as StepTimers::follow().
  void follow(const void* model) {
    if (timers_) timers_->follow(model);
  }
  /// With wall_clock_breakdown, of the last window; nothing before one has ended.
  std::optional<StepTimes> step_times() const { return timers_ ? timers_->last() : std::nullopt; }
  /// Null: none is asked for.
  const Timeline* timeline() const { return timeline_.get(); }

 private:
  std::shared_ptr<StepTimers> timers_;
  std::shared_ptr<Timeline> timeline_;
  std::optional<Listening> hears_times_;
  std::shared_ptr<Listening> hears_all_;  // of the timeline, shared by the trainings of the rank
};

}  // namespace trireme
