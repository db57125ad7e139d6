// The schedule of a pipeline's steps: the configured one, or the program's own, for as many micro-batches as a step
// has, and the same on every rank.
#pragma once

#include <functional>
#include <string>

#include "trireme/comm/group.h"
#include "trireme/schedule/check.h"
#include "trireme/schedule/schedule.h"

namespace trireme {

class ScheduleChoice {
 public:
  /// Stages and micro-batches -> schedule.
  using Make = std::function<pipeline::Schedule(int stages, int micro_batches)>;

  /// `checks_training` asks whether every parameter is trained, by `ties`. Local.
  ScheduleChoice(Make make, int stages, int micro_batches, pipeline::TiedParts ties, bool checks_training);

  const pipeline::Schedule& current() const { return schedule_; }
  /// Before a step of `micro_batches`. Collective over `all`. Throws ConfigError on every rank: they differ.
  void follow(Group& all, int micro_batches);
  /// The next steps run what `make` makes. Collective over `all`.
  /// Throws    ConfigError on every rank: it cannot be executed, trains nothing, has other parts, or they differ.
  void set(Group& all, Make make);

 private:
  pipeline::Schedule made(int micro_batches) const;

  Make make_;
  const int stages_;
  const pipeline::TiedParts ties_;
  const bool checks_training_;
  pipeline::Schedule schedule_;
  std::string text_;  ///< of `schedule_`
};

}  // namespace trireme
