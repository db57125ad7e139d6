// The hyperparameters of the next step, by parameter group: those of the program, and over them those of the schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "trireme/optim/lr_schedule.h"
#include "trireme/optim/options.h"

namespace trireme {

class Hyperparameters {
 public:
  /// `groups`: empty without an optimizer. Throws ConfigError as LrSchedule.
  Hyperparameters(std::vector<OptimizerOptions> groups, const LrScheduleOptions& schedule);

  /// In force for the next step. Where a device alone knows how many steps were applied, the learning rates are those
  /// after as many as the host knew of in the last follow().
  const std::vector<OptimizerOptions>& groups() const { return groups_; }
  /// Throws ConfigError that names `call`: there is no such group.
  const OptimizerOptions& of(size_t group, const char* call) const;
  const LrSchedule& schedule() const { return schedule_; }
  /// Whether the learning rates change from step to step by themselves.
  bool has_schedule() const { return schedule_.options().kind != LrScheduleKind::kConstant; }

  /// The next step goes by `options`; a schedule sets its own again after it.
  void set(size_t group, const OptimizerOptions& options);
  void set_lr(size_t group, double lr);

  /// `applied_steps` have changed the weights so far. Where that is news, the schedule goes on, but in groups that were
  /// set() since the last step.
  void follow(int64_t applied_steps);
  /// Goes on from a checkpoint, after `applied_steps`: the schedule's momenta, and `rates` where there is one for each
  /// group, as if set. Returns whether there is.
  bool resume(int64_t applied_steps, const std::vector<double>& rates);
  /// Goes on after `applied_steps` with the present values.
  void keep(int64_t applied_steps) { followed_ = applied_steps; }

  /// By group: set() since the last step was taken, which is now.
  std::vector<bool> take_given();

 private:
  void apply_schedule(size_t group);

  std::vector<OptimizerOptions> groups_;
  LrSchedule schedule_;
  int64_t followed_ = 0;
  std::vector<bool> given_;
};

}  // namespace trireme
