#include "pipeline/step_turns.h"

#include <algorithm>
#include <utility>

namespace trireme {

using pipeline::Instruction;
using pipeline::Kind;

StepTurns::StepTurns(Ownership& ownership, const pipeline::Schedule& schedule, c10::Device device,
                     const MicroBatchWork& work, Threads& threads, bool in_order)
    : ownership_(ownership),
      schedule_(schedule),
      device_(device),
      work_(work),
      threads_(threads),
      in_order_(in_order),
      planned_(schedule.chunks_of(ownership.stage())),
      passes_(static_cast<size_t>(schedule.micro_batches)) {
  ownership_.take_turns(this);
}

StepTurns::~StepTurns() {
  give_up();
  ownership_.take_turns(nullptr);
}

void StepTurns::give_up() {
  for (const auto& thread : threads_) thread->give_up();
}

bool StepTurns::has_left() const {
  return std::ranges::any_of(threads_, [](const auto& thread) { return thread->is_left(); });
}

void StepTurns::run() {
  follow_schedule();
  for (int micro_batch = 0; micro_batch < schedule_.micro_batches; ++micro_batch) complete(micro_batch);
}

void StepTurns::follow_schedule() {
  for (const pipeline::Step& step : schedule_.streams[ownership_.stage()])
    for (const Instruction& next : step) {
      if (next.kind != Kind::kForward && next.kind != Kind::kBackward) continue;
      (void)let_others_go();
      if (ownership_.has_stalled()) return;
      if (next.kind == Kind::kBackward) {
        backward(next.micro_batch, next.chunk);
        continue;
      }
      passes_[next.micro_batch].due = next.chunk + 1 == planned_ ? kAllTurns : next.chunk + 1;
      (void)go(next.micro_batch, Waits::kPlanned);
    }
}

/// The pieces of a turn, or all that are left where it is the stage's first one.
void StepTurns::backward(int micro_batch, int chunk) {
  Pass& pass = passes_[micro_batch];
  pass.due = kAllTurns;
  (void)go(micro_batch, Waits::kAll);
  if (!pass.has_ended) return;  // the schedule is left
  if (pass.pieces < 0) pass.pieces = work_.pieces(micro_batch);
  const int before = std::exchange(going_back_, micro_batch);
  while (pass.pieces > chunk) {
    --pass.pieces;
    work_.backward(micro_batch, pass.pieces);
  }
  going_back_ = before;
}

/// Without the schedule: to the end of the forward pass, and of the backward pass.
void StepTurns::complete(int micro_batch) {
  passes_[micro_batch].due = kAllTurns;
  while (!passes_[micro_batch].has_ended) (void)go(micro_batch, Waits::kAll);
  backward(micro_batch, 0);
}

// --- forward passes ------------------------------------------------------------------------------------------------

/// Lets the pass go on until its turns are ended that are due, or it needs what is not there. Returns whether it went
/// on at all.
bool StepTurns::go(int micro_batch, Waits waits) {
  Pass& pass = passes_[micro_batch];
  bool has_gone = false;
  while (!pass.has_ended && pass.turns < pass.due && is_there(pass, waits)) {
    go_once(micro_batch);
    has_gone = true;
  }
  return has_gone;
}

/// Whether the pass has what it stopped for; all stages may wait for each other instead.
bool StepTurns::is_there(Pass& pass, Waits waits) {
  if (pass.wait == nullptr) return true;
  bool has_come = ownership_.has_come(*pass.wait);
  if (!has_come && (waits == Waits::kAll || (waits == Waits::kPlanned && !is_off_plan(pass)))) {
    pass.is_awaited = true;
    has_come = ownership_.await(*pass.wait);
    pass.is_awaited = false;
  }
  if (has_come) pass.wait = nullptr;
  return has_come;
}

/// A pass with more turns than the schedule knows waits for what may come later than other turns that it knows of.
bool StepTurns::is_off_plan(const Pass& pass) const {
  return pass.turns >= planned_ || (!in_order_ && ownership_.is_for_new_sizes(*pass.wait));
}

void StepTurns::go_once(int micro_batch) {
  Pass& pass = passes_[micro_batch];
  if (!std::exchange(pass.has_begun, true)) {
    const auto free = std::ranges::find_if(threads_, [](const auto& thread) { return thread->has_ended(); });
    pass.thread =
        free != threads_.end() ? free->get() : threads_.emplace_back(std::make_unique<MicroBatchThread>(device_)).get();
    pass.thread->start([this, micro_batch] { work_.forward(micro_batch); });
  }
  const int before = std::exchange(running_, micro_batch);
  const MicroBatchThread::Stop why = pass.thread->go_on();
  running_ = before;
  if (why == MicroBatchThread::Stop::kTurn) ++pass.turns;
  if (why == MicroBatchThread::Stop::kEnd) pass.has_ended = true;
}

/// Passes that stay behind, and whose messages have come.
bool StepTurns::let_others_go() {
  bool has_any = false;
  for (int micro_batch = 0; micro_batch < schedule_.micro_batches; ++micro_batch) {
    const Pass& pass = passes_[micro_batch];
    if (pass.wait != nullptr && !pass.is_awaited) has_any = go(micro_batch, Waits::kNone) || has_any;
  }
  return has_any;
}

/// While the stage waits. Where the schedule is left, and a gradient is waited for, the micro-batches before come
/// first.
bool StepTurns::meanwhile() {
  if (ownership_.has_stalled() && !is_completing_) {
    is_completing_ = true;
    for (int micro_batch = 0; micro_batch < going_back_; ++micro_batch) complete(micro_batch);
    is_completing_ = false;
  }
  return let_others_go();
}

// --- on a forward pass's thread ------------------------------------------------------------------------------------

void StepTurns::stop(MicroBatchThread::Stop why) {
  const Ownership::Pause pause(ownership_);
  MicroBatchThread::current()->stop(why);
}

void StepTurns::begin_turn() {
  if (MicroBatchThread::current() != nullptr) stop(MicroBatchThread::Stop::kTurn);
}

bool StepTurns::await(const ownership::Wait& wait) {
  if (MicroBatchThread::current() == nullptr) return false;
  passes_[running_].wait = &wait;
  stop(MicroBatchThread::Stop::kWait);
  return true;
}

}  // namespace trireme
