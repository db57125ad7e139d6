// The hyperparameters of the next step, by parameter group: those of the program, and over them those of the schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "trireme/optim/lr_schedule.h"
#include "trireme/optim/options.h"

namespace trireme {

/// Hyperparameters by parameter group, and the schedule that changes them.
class Hyperparameters {
 public:
  /// `groups`: empty without an optimizer. Throws ConfigError as LrSchedule.
  Hyperparameters(std::vector<OptimizerOptions> groups, const LrScheduleOptions& schedule);

  /// Hyperparameters of the next step. If only a device knows how many steps were applied, learning rates follow from
  /// the number that the host knew at the last follow().
  const std::vector<OptimizerOptions>& groups() const { return groups_; }
  /// Throws ConfigError that names `call`: there is no such group.
  const OptimizerOptions& of(size_t group, const char* call) const;
  const LrSchedule& schedule() const { return schedule_; }
  /// Whether there is a schedule that changes learning rates.
  bool has_schedule() const { return schedule_.options().kind != LrScheduleKind::kConstant; }

  /// Sets the hyperparameters of the next step; afterwards a schedule sets its own again. What changes of a group of
  /// Muon's changes of the parameters that Adam updates there, too: their learning rate in proportion.
  void set(size_t group, const OptimizerOptions& options);
  void set_lr(size_t group, double lr);

  /// Tells that `applied_steps` steps have changed the weights so far. If the number is new, the schedule advances,
  /// except in groups that were set() since the last step.
  void follow(int64_t applied_steps);
  /// Continues from a checkpoint after `applied_steps`: takes the schedule's momenta, and `rates` as learning rates if
  /// there is one for each group. Returns whether there is.
  bool resume(int64_t applied_steps, const std::vector<double>& rates);
  /// Continues after `applied_steps` with the present values.
  void keep(int64_t applied_steps) { followed_ = applied_steps; }

  /// Called when a step is taken: by group, whether it was set() since the last one.
  std::vector<bool> take_given();

 private:
  void apply_schedule(size_t group);
  /// Gives the Adam part of a Muon group what has changed from `before`.
  void lead_adam(size_t group, const OptimizerOptions& before);

  std::vector<OptimizerOptions> groups_;
  LrSchedule schedule_;
  int64_t followed_ = 0;
  std::vector<bool> given_;
  std::vector<double> adam_ratios_;  ///< of learning rates, Adam's to Muon's, as they were given; by Muon's group
};

}  // namespace trireme
