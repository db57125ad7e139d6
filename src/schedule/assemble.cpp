// Loads, messages, buffers and the optimizer step around given computations.
#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "schedule/run.h"
#include "trireme/base/error.h"
#include "trireme/schedule/schedule.h"

namespace trireme::pipeline {
namespace {

bool is_forward(Kind kind) { return kind == Kind::kForward; }
bool gives_input_gradient(Kind kind) { return kind == Kind::kBackward || kind == Kind::kBackwardInput; }

using Pair = std::pair<int, int>;  // from, to

class Assembly {
 public:
  explicit Assembly(Schedule& schedule) : schedule_(schedule) {}

  void run(const std::vector<std::vector<Computation>>& computations) {
    for (int stage = 0; stage < schedule_.stages; ++stage)
      for (const Computation& computation : computations[stage]) list_messages(stage, computation);
    schedule_.streams.resize(schedule_.stages);
    schedule_.buffers.assign(schedule_.stages, std::vector<int>(schedule_.chunks));
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      buffers_ = Buffers(schedule_.chunks);
      received_.clear();
      for (const Computation& computation : computations[stage]) add(stage, computation);
      Step& last = schedule_.streams[stage].emplace_back();
      for (const Kind kind : {Kind::kReduceTiedGradients, Kind::kReduceGradients, Kind::kStep})
        last.push_back({.kind = kind});
    }
  }

 private:
  /// The buffers of each chunk on one stage, by micro-batch.
  class Buffers {
   public:
    explicit Buffers(int chunks = 0) : used_(chunks), spare_(chunks) {}
    int take(int chunk, int micro_batch, int& most) {
      auto& used = used_[chunk];
      auto& spare = spare_[chunk];
      if (const auto found = used.find(micro_batch); found != used.end()) return found->second;
      const int buffer = spare.empty() ? most++ : *spare.begin();
      spare.erase(buffer);
      used[micro_batch] = buffer;
      return buffer;
    }
    void free(int chunk, int micro_batch) {
      const auto found = used_[chunk].find(micro_batch);
      spare_[chunk].insert(found->second);
      used_[chunk].erase(found);
    }

   private:
    std::vector<std::map<int, int>> used_;
    std::vector<std::set<int>> spare_;  // of those that were used before; the lowest is taken first
  };

  /// The messages that `stage` sends after `computation`; none where the next part is its own.
  std::vector<std::pair<int, MessageContent>> messages_after(int stage, const Computation& computation) const {
    const int part = schedule_.part_of(stage, computation.chunk);
    const bool forwards = is_forward(computation.kind);
    const int next = forwards ? part + 1 : part - 1;
    const bool sends = forwards || gives_input_gradient(computation.kind);
    if (!sends || next < 0 || next == schedule_.parts() || schedule_.stage_of(next) == stage) return {};
    return {{schedule_.stage_of(next), {forwards, forwards ? part : next, computation.micro_batch}}};
  }

  void list_messages(int stage, const Computation& computation) {
    for (const auto& [to, message] : messages_after(stage, computation)) sent_[{stage, to}].push_back(message);
  }

  // A message comes behind all that its sender sent before it.
  void receive(Step& step, int stage, int from, const MessageContent& wanted) {
    if (received_.contains(wanted)) return;
    std::deque<MessageContent>& queue = sent_[{from, stage}];
    while (!queue.empty() && !received_.contains(wanted)) {
      const MessageContent message = queue.front();
      queue.pop_front();
      received_.insert(message);
      const int part = message.is_activation ? message.part + 1 : message.part;
      const int chunk = schedule_.chunk_of(part);
      step.push_back({.kind = message.is_activation ? Kind::kReceiveActivation : Kind::kReceiveGradient,
                      .chunk = chunk,
                      .micro_batch = message.micro_batch,
                      .buffer = buffers_.take(chunk, message.micro_batch, schedule_.buffers[stage][chunk]),
                      .peer = from});
    }
  }

  void add(int stage, const Computation& computation) {
    const auto [kind, chunk, micro_batch] = computation;
    const int part = schedule_.part_of(stage, chunk);
    Step& step = schedule_.streams[stage].emplace_back();
    const auto neighbour = [&](int other) {
      return other >= 0 && other < schedule_.parts() && schedule_.stage_of(other) != stage ? schedule_.stage_of(other)
                                                                                           : -1;
    };
    if (is_forward(kind) && neighbour(part - 1) >= 0)
      receive(step, stage, neighbour(part - 1), {true, part - 1, micro_batch});
    if (gives_input_gradient(kind) && neighbour(part + 1) >= 0)
      receive(step, stage, neighbour(part + 1), {false, part, micro_batch});
    const int buffer = buffers_.take(chunk, micro_batch, schedule_.buffers[stage][chunk]);
    // Inputs for the first part, labels for the last one.
    if (is_forward(kind) && (part == 0 || part == schedule_.parts() - 1))
      step.push_back({.kind = Kind::kLoadMicroBatch, .chunk = chunk, .micro_batch = micro_batch, .buffer = buffer});
    step.push_back({.kind = kind, .chunk = chunk, .micro_batch = micro_batch, .buffer = buffer});
    for (const auto& [to, message] : messages_after(stage, computation))
      step.push_back({.kind = message.is_activation ? Kind::kSendActivation : Kind::kSendGradient,
                      .chunk = chunk,
                      .micro_batch = micro_batch,
                      .buffer = buffer,
                      .peer = to});
    if (kind == Kind::kBackward || kind == Kind::kBackwardWeight) buffers_.free(chunk, micro_batch);
  }

  Schedule& schedule_;
  std::map<Pair, std::deque<MessageContent>> sent_;  // in order; shorter by what the receiver has taken
  Buffers buffers_;                                  // of the stage that is being assembled
  std::set<MessageContent> received_;                // by it
};

// Each micro-batch passes each chunk forward once, and backward once, whole or in halves; or never backward at all.
void check_complete(const Schedule& schedule, const std::vector<std::vector<Computation>>& computations) {
  if (static_cast<int>(computations.size()) != schedule.stages)
    throw ConfigError(str("schedule '", schedule.name, "': computations of ", computations.size(), " stages; expected ",
                          schedule.stages));
  for (int stage = 0; stage < schedule.stages; ++stage) {
    std::map<std::tuple<int, int, Kind>, int> count;
    for (const auto& [kind, chunk, micro_batch] : computations[stage]) {
      if (chunk < 0 || chunk >= schedule.chunks_of(stage) || micro_batch < 0 || micro_batch >= schedule.micro_batches)
        throw ConfigError(str("schedule '", schedule.name, "': stage ", stage, " computes chunk ", chunk,
                              " of micro-batch ", micro_batch, "; there are ", schedule.chunks_of(stage),
                              " chunks and ", schedule.micro_batches, " micro-batches, counted from 0"));
      ++count[{chunk, micro_batch, kind}];
    }
    for (int chunk = 0; chunk < schedule.chunks_of(stage); ++chunk)
      for (int micro_batch = 0; micro_batch < schedule.micro_batches; ++micro_batch) {
        const auto of = [&](Kind kind) { return count[{chunk, micro_batch, kind}]; };
        const int inputs = of(Kind::kBackwardInput), weights = of(Kind::kBackwardWeight), wholes = of(Kind::kBackward);
        const bool is_sound = of(Kind::kForward) == 1 && inputs == weights && inputs + wholes <= 1;
        if (!is_sound)
          throw ConfigError(str("schedule '", schedule.name, "': stage ", stage, " computes chunk ", chunk,
                                " of micro-batch ", micro_batch, " ", of(Kind::kForward), " times forward, ", wholes,
                                " times backward, ", inputs, " times for inputs and ", weights,
                                " times for weights; expected one forward, and one backward or one of each half"));
      }
  }
}

Schedule completed(Schedule schedule, const std::vector<std::vector<Computation>>& computations) {
  check_complete(schedule, computations);
  Assembly(schedule).run(computations);
  return schedule;
}

}  // namespace

Schedule assemble(std::string name, int stages, int micro_batches, int chunks, PartOrder order,
                  const std::vector<std::vector<Computation>>& computations) {
  Schedule schedule{.name = std::move(name),
                    .stages = stages,
                    .micro_batches = micro_batches,
                    .chunks = chunks,
                    .order = order,
                    .streams = {},
                    .buffers = {}};
  return completed(std::move(schedule), computations);
}

Schedule assemble(std::string name, int micro_batches, const std::vector<int>& stage_of_part,
                  const std::vector<std::vector<Computation>>& computations) {
  Schedule schedule{.name = std::move(name),
                    .stages = static_cast<int>(computations.size()),
                    .micro_batches = micro_batches,
                    .chunks = 1,
                    .order = PartOrder::kListed,
                    .stage_of_part = stage_of_part,
                    .streams = {},
                    .buffers = {}};
  for (int stage = 0; stage < schedule.stages; ++stage)
    schedule.chunks = std::max(schedule.chunks, schedule.chunks_of(stage));
  return completed(std::move(schedule), computations);
}

}  // namespace trireme::pipeline
