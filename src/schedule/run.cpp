#include "schedule/run.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "trireme/base/error.h"

namespace trireme::pipeline {

bool is_send(Kind kind) { return kind == Kind::kSendActivation || kind == Kind::kSendGradient; }
bool is_receive(Kind kind) { return kind == Kind::kReceiveActivation || kind == Kind::kReceiveGradient; }
bool is_computation(Kind kind) {
  return kind == Kind::kForward || kind == Kind::kBackward || kind == Kind::kBackwardInput ||
         kind == Kind::kBackwardWeight;
}

MessageContent content_of(const Schedule& schedule, int stage, const Instruction& instruction) {
  const int part = schedule.part_of(stage, instruction.chunk);
  switch (instruction.kind) {
    case Kind::kSendActivation:
      return {true, part, instruction.micro_batch};
    case Kind::kReceiveActivation:
      return {true, part - 1, instruction.micro_batch};
    case Kind::kSendGradient:
      return {false, part - 1, instruction.micro_batch};
    default:
      return {false, part, instruction.micro_batch};
  }
}

std::string name_of(int stage, const Instruction& instruction) {
  return str("stage ", stage, "'s ", to_text(instruction));
}

namespace {

class Run {
 public:
  Run(const Schedule& schedule, const PartTimes& times, Waits waits, const TiedParts& ties)
      : schedule_(schedule), times_(times), waits_(waits), ties_(ties), stages_(schedule.stages) {
    timeline_.slots.resize(schedule.stages);
    timeline_.peak_activations.assign(schedule.stages, 0);
  }

  Timeline finish() {
    size_t longest = 0;
    for (const auto& stream : schedule_.streams) longest = std::max(longest, stream.size());
    if (waits_ == Waits::kBarriers) {
      for (size_t step = 0; step < longest; ++step) {
        advance_all(step + 1);
        double latest = 0;
        for (const Stage& stage : stages_) latest = std::max(latest, stage.time);
        for (Stage& stage : stages_) stage.time = latest;
      }
    } else {
      advance_all(longest);
    }
    double busy = 0;
    for (const auto& slots : timeline_.slots)
      for (const Slot& slot : slots) {
        timeline_.makespan = std::max(timeline_.makespan, slot.end);
        busy += slot.end - slot.begin;
      }
    if (timeline_.makespan > 0) timeline_.bubble_share = 1 - busy / (timeline_.makespan * schedule_.stages);
    return std::move(timeline_);
  }

 private:
  struct Stage {
    size_t step = 0;
    size_t instruction = 0;  ///< of that step
    double time = 0;
    int live_activations = 0;
  };

  // All stages up to step `end`. The order in which they come does not matter: what a stage waits for is a message or a
  // computation, and each is there once.
  void advance_all(size_t end) {
    std::vector<int> stages(schedule_.stages);  // that may be able to go on
    std::iota(stages.rbegin(), stages.rend(), 0);
    while (!stages.empty()) {
      const int stage = stages.back();
      stages.pop_back();
      while (const Instruction* next = next_of(stage, end)) {
        if (!execute(stage, *next)) break;
        ++stages_[stage].instruction;
        if (is_send(next->kind)) stages.push_back(next->peer);
        if (gives_weights(next->kind)) add_owners(stages, schedule_.part_of(stage, next->chunk));
      }
    }
    for (int stage = 0; stage < schedule_.stages; ++stage)
      if (const Instruction* stuck = next_of(stage, end)) explain(stage, *stuck, end);
  }

  const Instruction* next_of(int stage, size_t end) {
    const auto& stream = schedule_.streams[stage];
    Stage& at = stages_[stage];
    while (at.step < std::min(end, stream.size()) && at.instruction == stream[at.step].size()) {
      ++at.step;
      at.instruction = 0;
    }
    return at.step < std::min(end, stream.size()) ? &stream[at.step][at.instruction] : nullptr;
  }

  // False where it has to wait.
  bool execute(int stage, const Instruction& instruction) {
    Stage& at = stages_[stage];
    if (is_send(instruction.kind)) {
      arrivals_[{stage, instruction.peer, content_of(schedule_, stage, instruction)}] = at.time + times_.message;
    } else if (is_receive(instruction.kind)) {
      const auto arrival = arrivals_.find({instruction.peer, stage, content_of(schedule_, stage, instruction)});
      if (arrival == arrivals_.end()) return false;
      // It is there when it is computed with: other messages may overtake the wait.
      double& ready = ready_[{stage, instruction.chunk, instruction.micro_batch}];
      ready = std::max(ready, arrival->second);
    } else if (is_computation(instruction.kind)) {
      if (missing_copy(stage, instruction)) return false;
      compute(stage, instruction);
      if (gives_weights(instruction.kind) && !ties_.parts.empty())
        with_weights_[schedule_.part_of(stage, instruction.chunk)].insert(instruction.micro_batch);
    }
    return true;
  }

  static bool gives_weights(Kind kind) { return kind == Kind::kBackward || kind == Kind::kBackwardWeight; }

  // The stages that take gradients of tied parameters from `part`.
  void add_owners(std::vector<int>& stages, int part) const {
    for (const std::vector<int>& parts : ties_.parts)
      if (std::find(parts.begin() + 1, parts.end(), part) != parts.end())
        stages.push_back(schedule_.stage_of(parts.front()));
  }

  // A part that has to compute before this instruction, which takes the gradients of its copies of tied parameters.
  std::optional<int> missing_copy(int stage, const Instruction& instruction) {
    if (ties_.parts.empty() || !gives_weights(instruction.kind)) return {};
    const int owner = schedule_.part_of(stage, instruction.chunk);
    const auto micro_batches = static_cast<size_t>(schedule_.micro_batches);
    if (!ties_.each_micro_batch && with_weights_[owner].size() + 1 < micro_batches) return {};
    for (const std::vector<int>& parts : ties_.parts) {
      if (parts.front() != owner) continue;
      for (size_t i = 1; i < parts.size(); ++i) {
        const std::set<int>& done = with_weights_[parts[i]];
        if (ties_.each_micro_batch ? !done.contains(instruction.micro_batch) : done.size() < micro_batches)
          return parts[i];
      }
    }
    return {};
  }

  void compute(int stage, const Instruction& instruction) {
    Stage& at = stages_[stage];
    const auto ready = ready_.find({stage, instruction.chunk, instruction.micro_batch});
    if (ready != ready_.end()) at.time = std::max(at.time, ready->second);
    const double begin = at.time;
    at.time += time_of(instruction.kind) * factor_of(schedule_.part_of(stage, instruction.chunk));
    timeline_.slots[stage].push_back({instruction, begin, at.time});
    if (instruction.kind == Kind::kForward) ++at.live_activations;
    int& peak = timeline_.peak_activations[stage];
    peak = std::max(peak, at.live_activations);
    if (instruction.kind == Kind::kBackward || instruction.kind == Kind::kBackwardWeight) --at.live_activations;
  }

  double factor_of(int part) const { return times_.of_part.empty() ? 1 : times_.of_part.at(part); }

  double time_of(Kind kind) const {
    switch (kind) {
      case Kind::kForward:
        return times_.forward;
      case Kind::kBackward:
        return times_.backward_input + times_.backward_weight;
      case Kind::kBackwardInput:
        return times_.backward_input;
      default:
        return times_.backward_weight;
    }
  }

  [[noreturn]] void explain(int stage, const Instruction& stuck, size_t end) {
    if (const auto part = missing_copy(stage, stuck))
      throw ConfigError(str("schedule '", schedule_.name, "': ", name_of(stage, stuck), " waits for ever for part ",
                            *part, " of the model, on stage ", schedule_.stage_of(*part),
                            ", which shares parameters with it; let the last parts' gradients of weights come first",
                            ties_.each_micro_batch ? ", take another schedule, or leave \"deterministic\" out" : ""));
    const Instruction* other = next_of(stuck.peer, end);
    throw ConfigError(str("schedule '", schedule_.name, "': ", name_of(stage, stuck), " waits for ever: ",
                          other == nullptr ? str("stage ", stuck.peer, " has come to the end of its steps")
                                           : str("its sender waits in ", name_of(stuck.peer, *other)),
                          waits_ == Waits::kBarriers ? " before the barrier" : "",
                          "; let the sender's instructions come in an order in which no stage waits for itself"));
  }

  const Schedule& schedule_;
  const PartTimes times_;
  const Waits waits_;
  const TiedParts& ties_;
  std::vector<Stage> stages_;
  std::map<int, std::set<int>> with_weights_;  // by part: micro-batches whose gradients of weights are computed
  std::map<std::tuple<int, int, MessageContent>, double> arrivals_;  // by sender and receiver
  std::map<std::tuple<int, int, int>, double> ready_;  // by stage, chunk and micro-batch: the newest message
  Timeline timeline_;
};

}  // namespace

Timeline run(const Schedule& schedule, const PartTimes& times, Waits waits, const TiedParts& ties) {
  return Run(schedule, times, waits, ties).finish();
}

}  // namespace trireme::pipeline
