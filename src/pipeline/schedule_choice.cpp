#include "pipeline/schedule_choice.h"

#include <utility>

#include "pipeline/rank_agreement.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

/// All of a schedule, a line for each instruction.
std::string text_of(const pipeline::Schedule& schedule) {
  std::string text = str("schedule '", schedule.name, "' of ", schedule.micro_batches, " micro-batches");
  for (int stage = 0; stage < schedule.stages; ++stage)
    for (const pipeline::Step& step : schedule.streams[stage])
      for (const pipeline::Instruction& instruction : step) text += str("\nstage ", stage, ", ", to_text(instruction));
  return text;
}

}  // namespace

ScheduleChoice::ScheduleChoice(Make make, int stages, int micro_batches, pipeline::TiedParts ties, bool checks_training)
    : make_(std::move(make)), stages_(stages), ties_(std::move(ties)), checks_training_(checks_training) {
  schedule_ = made(micro_batches);
  text_ = text_of(schedule_);
}

pipeline::Schedule ScheduleChoice::made(int micro_batches) const {
  pipeline::Schedule schedule = make_(stages_, micro_batches);
  pipeline::check(schedule);
  if (checks_training_) check_training(schedule, ties_);
  return schedule;
}

void ScheduleChoice::follow(Group& all, int micro_batches) {
  const bool is_new = schedule_.micro_batches != micro_batches;
  pipeline::Schedule next;
  agree(all, "train_batch", [&] {
    if (!is_new) return text_;
    next = made(micro_batches);
    return text_of(next);
  });
  if (!is_new) return;
  text_ = text_of(next);
  schedule_ = std::move(next);
}

void ScheduleChoice::set(Group& all, Make make) {
  const int micro_batches = schedule_.micro_batches;
  pipeline::Schedule next;
  std::string text;
  agree(all, "set_schedule", [&] {
    next = make(stages_, micro_batches);
    pipeline::check(next);
    if (next.stages != stages_ || next.micro_batches != micro_batches)
      throw ConfigError(str("set_schedule: '", next.name, "' is of ", next.stages, " stages and ", next.micro_batches,
                            " micro-batches, and asked for were ", stages_, " and ", micro_batches));
    if (next.chunks != schedule_.chunks || next.order != schedule_.order)
      throw ConfigError(str("set_schedule: '", next.name, "' has other parts than the model was cut into for '",
                            schedule_.name, "'; it needs as many chunks, placed alike"));
    check_training(next, ties_);
    return text = text_of(next);
  });
  make_ = std::move(make);
  schedule_ = std::move(next);
  text_ = std::move(text);
}

}  // namespace trireme
