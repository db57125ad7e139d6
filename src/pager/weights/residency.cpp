#include "pager/weights/residency.h"

#include <utility>

namespace trireme {

Residency::Residency(std::vector<Unit> units, const Limits& limits)
    : units_(std::move(units)), limits_(limits), states_(units_.size()), trace_(static_cast<int>(units_.size())) {}

Residency::Actions Residency::touch(std::span<const int> units, const Touch& touch) {
  actions_.clear();
  running_serial_ = touch.serial;
  trace_.touch(units.front());
  for (const int unit : units) {
    states_[unit].last_serial = touch.serial;
    states_[unit].last_touch = ++touches_;
    need(unit, touch.autocast && !touch.exact && units_[unit].may_round);
  }
  return actions_;
}

Residency::Actions Residency::look_ahead(int touched, const Touch& touch) {
  actions_.clear();
  if (touched == looked_ahead_from_) return actions_;
  looked_ahead_from_ = touched;
  int64_t bytes = 0;
  for (int64_t ahead = 1; trace_.upcoming(ahead) >= 0; ++ahead) {
    const int next = trace_.upcoming(ahead);
    if (next == touched) continue;
    bytes += units_[next].bytes;
    if (bytes > limits_.prefetch_bytes) return actions_;
    if (states_[next].is_whole) continue;
    while (live_bytes_ + units_[next].bytes > limits_.live_bytes) {
      const int victim = choose_victim();
      if (victim < 0 || trace_.distance_to(victim) <= ahead) return actions_;
      decide(Kind::kRelease, victim);
    }
    decide(Kind::kGather, next, touch.autocast && units_[next].may_round);
  }
  return actions_;
}

Residency::Actions Residency::hold(int unit, uint64_t serial) {
  actions_.clear();
  running_serial_ = serial;
  states_[unit].last_touch = ++touches_;
  ++states_[unit].holds;
  need(unit, /*rounded=*/false);
  return actions_;
}

Residency::Actions Residency::let_go(int unit) {
  actions_.clear();
  --states_[unit].holds;
  make_room(0);
  return actions_;
}

Residency::Actions Residency::release_all() {
  actions_.clear();
  for (size_t unit = 0; unit < units_.size(); ++unit)
    if (states_[unit].is_whole && states_[unit].holds == 0) decide(Kind::kRelease, static_cast<int>(unit));
  return actions_;
}

Residency::Actions Residency::release(int unit) {
  actions_.clear();
  if (states_[unit].is_whole) decide(Kind::kRelease, unit);
  return actions_;
}

void Residency::cancel(Actions rest) {
  // Backwards, so that each meets the state that it left.
  for (auto action = rest.rbegin(); action != rest.rend(); ++action)
    apply({action->kind == Kind::kGather ? Kind::kRelease : Kind::kGather, action->unit, action->was_rounded});
}

void Residency::end_step() {
  trace_.end_step();
  looked_ahead_from_ = -1;
}

void Residency::decide(Kind kind, int unit, bool rounded) {
  actions_.push_back({kind, unit, rounded, kind == Kind::kRelease && states_[unit].is_rounded});
  apply(actions_.back());
}

void Residency::apply(const Action& action) {
  State& state = states_[action.unit];
  state.is_whole = action.kind == Kind::kGather;
  state.is_rounded = state.is_whole && action.rounded;
  live_bytes_ += state.is_whole ? units_[action.unit].bytes : -units_[action.unit].bytes;
}

// A unit's own bits serve where rounded ones would do, not the other way round.
void Residency::need(int unit, bool rounded) {
  const State& state = states_[unit];
  if (state.is_whole && state.is_rounded && !rounded) decide(Kind::kRelease, unit);
  if (state.is_whole) return;
  make_room(units_[unit].bytes);
  decide(Kind::kGather, unit, rounded);
}

// Releases the units that are needed last until `bytes` fit, or until all that is left belongs to the running operator.
void Residency::make_room(int64_t bytes) {
  while (live_bytes_ + bytes > limits_.live_bytes) {
    const int victim = choose_victim();
    if (victim < 0) return;
    decide(Kind::kRelease, victim);
  }
}

int Residency::choose_victim() const {
  int victim = -1;
  for (int unit = 0; unit < static_cast<int>(states_.size()); ++unit) {
    const State& state = states_[unit];
    if (!state.is_whole || state.holds > 0) continue;
    if (state.last_serial == running_serial_ && state.last_touch > 0) continue;
    if (victim < 0 || is_needed_later(unit, victim)) victim = unit;
  }
  return victim;
}

// By the trace where it is known, else the least recently touched.
bool Residency::is_needed_later(int a, int b) const {
  const int64_t distance_a = trace_.distance_to(a);
  const int64_t distance_b = trace_.distance_to(b);
  if (distance_a != distance_b) return distance_a > distance_b;
  return states_[a].last_touch < states_[b].last_touch;
}

}  // namespace trireme
