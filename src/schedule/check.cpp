#include "trireme/schedule/check.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "schedule/run.h"
#include "trireme/base/error.h"

namespace trireme::pipeline {
namespace {

template <class Visit>
void for_each_instruction(const Schedule& schedule, int stage, const Visit& visit) {
  for (const Step& step : schedule.streams[stage])
    for (const Instruction& instruction : step) visit(instruction);
}

template <class... Parts>
[[noreturn]] void refuse(const Schedule& schedule, const Parts&... parts) {
  throw ConfigError(str("schedule '", schedule.name, "': ", parts...));
}

void check_numbers(const Schedule& schedule) {
  if (static_cast<int>(schedule.streams.size()) != schedule.stages ||
      static_cast<int>(schedule.buffers.size()) != schedule.stages)
    refuse(schedule, schedule.streams.size(), " streams and buffers of ", schedule.buffers.size(),
           " stages; expected those of ", schedule.stages);
  for (int stage = 0; stage < schedule.stages; ++stage)
    for_each_instruction(schedule, stage, [&](const Instruction& instruction) {
      const bool is_of_one = is_computation(instruction.kind) || is_send(instruction.kind) ||
                             is_receive(instruction.kind) || instruction.kind == Kind::kLoadMicroBatch;
      if (!is_of_one) return;
      if (instruction.micro_batch < 0 || instruction.micro_batch >= schedule.micro_batches)
        refuse(schedule, name_of(stage, instruction), " is of no micro-batch; there are ", schedule.micro_batches,
               ", counted from 0");
      if (instruction.chunk < 0 || instruction.chunk >= schedule.chunks_of(stage))
        refuse(schedule, name_of(stage, instruction), " is of no chunk; there are ", schedule.chunks_of(stage),
               ", counted from 0");
      if (instruction.buffer < 0 || instruction.buffer >= schedule.buffers[stage].at(instruction.chunk))
        refuse(schedule, name_of(stage, instruction), " has no buffer; the stage has ",
               schedule.buffers[stage][instruction.chunk], ", counted from 0");
      const bool has_peer = is_send(instruction.kind) || is_receive(instruction.kind);
      if (has_peer && (instruction.peer < 0 || instruction.peer >= schedule.stages || instruction.peer == stage))
        refuse(schedule, name_of(stage, instruction), " has no peer; name another stage of ", schedule.stages);
    });
}

/// A message instruction and the stage that executes it.
struct Message {
  int stage;
  Instruction instruction;
};

void check_directions(const Schedule& schedule) {
  std::map<std::pair<int, int>, std::vector<Message>> sent, received;  // by sender and receiver
  for (int stage = 0; stage < schedule.stages; ++stage)
    for_each_instruction(schedule, stage, [&](const Instruction& instruction) {
      if (is_send(instruction.kind)) sent[{stage, instruction.peer}].push_back({stage, instruction});
      if (is_receive(instruction.kind)) received[{instruction.peer, stage}].push_back({stage, instruction});
    });
  std::set<std::pair<int, int>> directions;
  for (const auto& [direction, messages] : sent) directions.insert(direction);
  for (const auto& [direction, messages] : received) directions.insert(direction);
  for (const auto& direction : directions) {
    const auto &sends = sent[direction], &receives = received[direction];
    for (size_t i = 0; i < std::max(sends.size(), receives.size()); ++i) {
      if (i >= receives.size())
        refuse(schedule, name_of(sends[i].stage, sends[i].instruction), " is received by nobody; let stage ",
               direction.second, " receive it");
      if (i >= sends.size())
        refuse(schedule, name_of(receives[i].stage, receives[i].instruction), " is sent by nobody; let stage ",
               direction.first, " send it");
      if (content_of(schedule, sends[i].stage, sends[i].instruction) !=
          content_of(schedule, receives[i].stage, receives[i].instruction))
        refuse(schedule, "message ", i, " from stage ", direction.first, " to stage ", direction.second, " is ",
               name_of(sends[i].stage, sends[i].instruction), ", and ",
               name_of(receives[i].stage, receives[i].instruction),
               " takes it; messages of one direction arrive in the order in which they are sent");
    }
  }
}

// On one stage: what must come before what, and that buffers are not overwritten.
class StageCheck {
 public:
  StageCheck(const Schedule& schedule, int stage) : schedule_(schedule), stage_(stage) {}

  void run() {
    for_each_instruction(schedule_, stage_, [&](const Instruction& instruction) { look_at(instruction); });
    for (int chunk = 0; chunk < schedule_.chunks_of(stage_); ++chunk)
      for (int micro_batch = 0; micro_batch < schedule_.micro_batches; ++micro_batch) check_passed(chunk, micro_batch);
  }

 private:
  using Which = std::tuple<int, int, Kind>;  // chunk, micro-batch

  bool has(const Instruction& instruction, Kind kind) const {
    return done_.contains({instruction.chunk, instruction.micro_batch, kind});
  }
  void require(const Instruction& instruction, bool is_there, Kind kind) const {
    if (is_there) return;
    Instruction before = instruction;
    before.kind = kind;
    before.peer = -1;
    refuse(schedule_, name_of(stage_, instruction), " comes before its ", to_text(before), "; let it follow");
  }

  void look_at(const Instruction& instruction) {
    const Kind kind = instruction.kind;
    if (instruction.micro_batch < 0) return;
    watch_buffer(instruction);
    const int part = schedule_.part_of(stage_, instruction.chunk);
    const auto is_elsewhere = [&](int other) {
      return other >= 0 && other < schedule_.parts() && schedule_.stage_of(other) != stage_;
    };
    const auto is_here = [&](int other) {
      return other >= 0 && other < schedule_.parts() && schedule_.stage_of(other) == stage_;
    };
    // The same micro-batch in the neighbouring part of this stage.
    const auto beside = [&](int other) {
      Instruction neighbour = instruction;
      neighbour.chunk = schedule_.chunk_of(other);
      return neighbour;
    };
    const bool starts_backward = kind == Kind::kBackward || kind == Kind::kBackwardInput;
    if (kind == Kind::kForward && is_elsewhere(part - 1))
      require(instruction, has(instruction, Kind::kReceiveActivation), Kind::kReceiveActivation);
    if (kind == Kind::kForward && is_here(part - 1))
      require(instruction, has(beside(part - 1), Kind::kForward), Kind::kForward);
    if (starts_backward) {
      require(instruction, has(instruction, Kind::kForward), Kind::kForward);
      if (is_elsewhere(part + 1))
        require(instruction, has(instruction, Kind::kReceiveGradient), Kind::kReceiveGradient);
      if (is_here(part + 1)) {
        const Instruction next = beside(part + 1);
        require(instruction, has(next, Kind::kBackward) || has(next, Kind::kBackwardInput), Kind::kBackward);
      }
    }
    if (kind == Kind::kBackwardWeight)
      require(instruction, has(instruction, Kind::kBackwardInput), Kind::kBackwardInput);
    if (kind == Kind::kSendActivation) require(instruction, has(instruction, Kind::kForward), Kind::kForward);
    if (kind == Kind::kSendGradient)
      require(instruction, has(instruction, Kind::kBackward) || has(instruction, Kind::kBackwardInput),
              Kind::kBackward);
    if (!done_.insert({instruction.chunk, instruction.micro_batch, kind}).second)
      refuse(schedule_, name_of(stage_, instruction), " is there twice; leave one out");
  }

  // Once a buffer has gone to another micro-batch the one before must not need it again.
  void watch_buffer(const Instruction& instruction) {
    auto& [holder, was_holder] = buffers_[{instruction.chunk, instruction.buffer}];
    if (was_holder.contains(instruction.micro_batch) && holder.micro_batch != instruction.micro_batch)
      refuse(schedule_, name_of(stage_, instruction), " needs a buffer that ", name_of(stage_, holder),
             " has overwritten; give one of the two another buffer");
    if (holder.micro_batch != instruction.micro_batch) holder = instruction;
    was_holder.insert(instruction.micro_batch);
  }

  void check_passed(int chunk, int micro_batch) const {
    const auto has_done = [&](Kind kind) { return done_.contains(Which{chunk, micro_batch, kind}); };
    if (!has_done(Kind::kForward))
      refuse(schedule_, "stage ", stage_, " never computes chunk ", chunk, " of micro-batch ", micro_batch,
             "; add its forward");
    if (has_done(Kind::kBackwardInput) && !has_done(Kind::kBackwardWeight))
      refuse(schedule_, "stage ", stage_, " computes no gradients of weights for chunk ", chunk, " of micro-batch ",
             micro_batch, "; add BackwardWeight");
    if (has_done(Kind::kBackward) && has_done(Kind::kBackwardInput))
      refuse(schedule_, "stage ", stage_, " goes backward twice through chunk ", chunk, " for micro-batch ",
             micro_batch, "; leave BackwardPass or its halves out");
  }

  struct Buffer {
    Instruction holder;  ///< the first one of the micro-batch that is in it
    std::set<int> was_holder;
  };

  const Schedule& schedule_;
  const int stage_;
  std::set<Which> done_;
  std::map<std::pair<int, int>, Buffer> buffers_;  // by chunk and buffer
};

// All micro-batches go backward through all parts, or none through any.
void check_backwards(const Schedule& schedule) {
  int64_t backwards = 0;
  for (int stage = 0; stage < schedule.stages; ++stage)
    for_each_instruction(schedule, stage, [&](const Instruction& instruction) {
      backwards += instruction.kind == Kind::kBackward || instruction.kind == Kind::kBackwardInput;
    });
  const int64_t all = static_cast<int64_t>(schedule.parts()) * schedule.micro_batches;
  if (backwards != 0 && backwards != all)
    refuse(schedule, backwards, " backward passes; expected ", all, ", one of each micro-batch through each of ",
           schedule.parts(), " parts, or none");
}

// The check of one stage, in the order of its instructions.
class TrainingCheck {
 public:
  TrainingCheck(const Schedule& schedule, int stage) : schedule_(schedule), stage_(stage) {}

  void run() {
    for_each_instruction(schedule_, stage_,
                         [&](const Instruction& instruction) { backwards_ += is_backward(instruction); });
    for_each_instruction(schedule_, stage_, [&](const Instruction& instruction) { look_at(instruction); });
    if (steps_ == 0)
      refuse(schedule_, "stage ", stage_,
             " has no OptimizerStep, so that its weights would never change; add one after "
             "its last backward pass");
  }

 private:
  static bool is_backward(const Instruction& instruction) {
    return is_computation(instruction.kind) && instruction.kind != Kind::kForward;
  }

  void look_at(const Instruction& instruction) {
    const Kind kind = instruction.kind;
    if (kind == Kind::kLoadMicroBatch) loaded_.insert({instruction.chunk, instruction.micro_batch});
    if (kind == Kind::kForward) check_loaded(instruction);
    backwards_ -= is_backward(instruction);
    if (kind != Kind::kStep && kind != Kind::kReduceGradients && kind != Kind::kReduceTiedGradients) return;
    if (backwards_ > 0)
      refuse(schedule_, name_of(stage_, instruction), " comes before ", backwards_,
             " of the stage's backward passes; "
             "let it follow the last one");
    if (steps_ > 0 && kind != Kind::kStep)
      refuse(schedule_, name_of(stage_, instruction), " comes after the OptimizerStep; let it come before");
    if (kind == Kind::kStep && ++steps_ > 1)
      refuse(schedule_, "stage ", stage_, " has two OptimizerSteps; leave one out");
  }

  // The first part computes with a micro-batch's inputs, the last one with its labels.
  void check_loaded(const Instruction& instruction) const {
    const int part = schedule_.part_of(stage_, instruction.chunk);
    if (part != 0 && part != schedule_.parts() - 1) return;
    if (!loaded_.contains({instruction.chunk, instruction.micro_batch}))
      refuse(schedule_, name_of(stage_, instruction),
             " has no LoadMicroBatch before it, which gives the first part its "
             "inputs and the last part its labels; add one");
  }

  const Schedule& schedule_;
  const int stage_;
  int64_t backwards_ = 0;  // that are to come
  int steps_ = 0;
  std::set<std::pair<int, int>> loaded_;  // by chunk and micro-batch
};

}  // namespace

void check_training(const Schedule& schedule, const TiedParts& ties) {
  bool goes_back = false;
  for (int stage = 0; stage < schedule.stages; ++stage)
    for_each_instruction(schedule, stage, [&](const Instruction& instruction) {
      goes_back |= instruction.kind == Kind::kBackward || instruction.kind == Kind::kBackwardInput;
    });
  if (!goes_back)
    refuse(schedule,
           "there is no backward pass, so that nothing can be trained; add a BackwardPass of each micro-batch "
           "through each part, or call eval_batch()");
  for (int stage = 0; stage < schedule.stages; ++stage) TrainingCheck(schedule, stage).run();
  if (!ties.parts.empty()) (void)run(schedule, {}, Waits::kReceives, ties);
}

void check(const Schedule& schedule, Waits waits) {
  check_numbers(schedule);
  check_directions(schedule);
  for (int stage = 0; stage < schedule.stages; ++stage) StageCheck(schedule, stage).run();
  check_backwards(schedule);
  (void)run(schedule, {}, waits);
}

}  // namespace trireme::pipeline
