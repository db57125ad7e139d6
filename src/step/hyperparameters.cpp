#include "trireme/step/hyperparameters.h"

#include <utility>

#include "trireme/base/error.h"
#include "trireme/optim/fields.h"

namespace trireme {

namespace {

std::vector<double> rates_of(const std::vector<OptimizerOptions>& groups) {
  std::vector<double> rates;
  for (const OptimizerOptions& group : groups) rates.push_back(group.lr);
  return rates;
}

}  // namespace

Hyperparameters::Hyperparameters(std::vector<OptimizerOptions> groups, const LrScheduleOptions& schedule)
    : groups_(std::move(groups)), schedule_(schedule, rates_of(groups_)), given_(groups_.size()) {
  for (size_t group = 0; group < groups_.size() && groups_[group].kind == OptimizerKind::kMuon; ++group) {
    const double lr = groups_[group].lr;
    adam_ratios_.push_back(lr == 0 ? 1 : groups_[groups_.size() / 2 + group].lr / lr);
  }
  for (size_t group = 0; group < groups_.size(); ++group) apply_schedule(group);
}

const OptimizerOptions& Hyperparameters::of(size_t group, const char* call) const {
  if (group >= groups_.size())
    throw ConfigError(
        str(call, ": there is no parameter group ", group, "; use one of the ", groups_.size(), ", counted from 0"));
  return groups_[group];
}

void Hyperparameters::set(size_t group, const OptimizerOptions& options) {
  const OptimizerOptions before = std::exchange(groups_[group], options);
  given_[group] = true;
  lead_adam(group, before);
}

void Hyperparameters::set_lr(size_t group, double lr) {
  OptimizerOptions options = groups_[group];
  options.lr = lr;
  set(group, options);
}

void Hyperparameters::lead_adam(size_t group, const OptimizerOptions& before) {
  if (group >= adam_ratios_.size()) return;
  const size_t of_adam = groups_.size() / 2 + group;
  const OptimizerOptions& now = groups_[group];
  OptimizerOptions& adam = groups_[of_adam];
  const auto follow = [&](auto value, auto changed) {
    if (now.*value == before.*value) return;
    adam.*value = changed;
    given_[of_adam] = true;
  };
  follow(&OptimizerOptions::lr, now.lr * adam_ratios_[group]);
  fields([&](const Field& field, auto value, auto) {
    if (field.muons_adam) follow(value, now.*value);
  });
}

void Hyperparameters::apply_schedule(size_t group) {
  groups_[group].lr = schedule_.lr(followed_, group);
  if (const std::optional<double> momentum = schedule_.momentum(followed_, group))
    set_momentum(groups_[group], {*momentum, LrSchedule::kCycleBeta2});
}

void Hyperparameters::follow(int64_t applied_steps) {
  const bool has_moved = std::exchange(followed_, applied_steps) != applied_steps;
  if (!has_moved || !has_schedule()) return;
  for (size_t group = 0; group < groups_.size(); ++group)
    if (!given_[group]) apply_schedule(group);
}

bool Hyperparameters::resume(int64_t applied_steps, const std::vector<double>& rates) {
  followed_ = applied_steps;
  for (size_t group = 0; group < groups_.size(); ++group) apply_schedule(group);
  if (rates.size() != groups_.size()) return false;
  for (size_t group = 0; group < groups_.size(); ++group) set_lr(group, rates[group]);
  return true;
}

std::vector<bool> Hyperparameters::take_given() { return std::exchange(given_, std::vector<bool>(groups_.size())); }

}  // namespace trireme
