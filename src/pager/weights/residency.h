// Which units are whole: decided from touches, their order in the step before, and sizes, never from timing. So ranks
// that run the same program decide alike, and a planner that replays the touches sees what a run does. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pager/weights/trace.h"

namespace trireme {

class Residency {
 public:
  struct Unit {
    int64_t bytes = 0;       ///< while it is whole
    bool may_round = false;  ///< a read under autocast can do with weights rounded to 16 bits
  };
  struct Limits {
    int64_t live_bytes = 0;      ///< whole units together; one operator may need more
    int64_t prefetch_bytes = 0;  ///< of units gathered ahead of their use
  };

  enum class Kind : uint8_t { kGather, kRelease };
  struct Action {
    Kind kind;
    int unit;
    bool rounded = false;      ///< of a gather
    bool was_rounded = false;  ///< of a release
    bool operator==(const Action&) const = default;
  };
  /// In the order in which they are to be executed; valid until the next call of this object.
  using Actions = std::span<const Action>;

  Residency(std::vector<Unit> units, const Limits& limits);

  /// One operator, or another access.
  struct Touch {
    uint64_t serial = 0;  ///< of the operator: what it has touched stays while it runs
    bool exact = false;   ///< needs the weights' own bits
    bool autocast = false;
  };
  /// `units` must be whole now, all of one leaf: the first stands for them in the trace.
  Actions touch(std::span<const int> units, const Touch& touch);
  /// After touch(), of the same units: what the trace says will be touched next, as far as the limits allow.
  Actions look_ahead(int touched, const Touch& touch);
  /// `unit` must be whole, in its own bits, until let_go(). No touch of the trace: what is looked at now and then is
  /// not gathered ahead.
  Actions hold(int unit, uint64_t serial);
  /// One hold less. Releases what is over the limit.
  Actions let_go(int unit);
  /// All that is not held is released.
  Actions release_all();
  Actions release(int unit);
  /// The last of the actions, `rest`, were not executed.
  void cancel(Actions rest);

  /// The step is over; the next one is expected to touch the same units in the same order.
  void end_step();

  bool is_held(int unit) const { return states_[unit].holds > 0; }
  int64_t live_bytes() const { return live_bytes_; }
  int64_t limit_bytes() const { return limits_.live_bytes; }

 private:
  struct State {
    bool is_whole = false;
    bool is_rounded = false;
    uint64_t last_serial = 0;
    int64_t last_touch = 0;  // 0: never
    int holds = 0;
  };

  void decide(Kind kind, int unit, bool rounded = false);
  void apply(const Action& action);
  void need(int unit, bool rounded);
  void make_room(int64_t bytes);
  int choose_victim() const;
  bool is_needed_later(int a, int b) const;

  const std::vector<Unit> units_;
  const Limits limits_;
  std::vector<State> states_;
  Trace trace_;
  std::vector<Action> actions_;
  int64_t live_bytes_ = 0;
  int64_t touches_ = 0;
  uint64_t running_serial_ = 0;
  int looked_ahead_from_ = -1;
};

}  // namespace trireme
