// Micro-batches and peers of instructions that name their buffers alone.
#include <map>
#include <utility>

#include "schedule/run.h"
#include "trireme/base/error.h"
#include "trireme/schedule/schedule.h"

namespace trireme::pipeline {
namespace {

class StageBuffers {
 public:
  /// `arriving`: the micro-batches that the stage before sends, in order.
  StageBuffers(const Schedule& schedule, int stage, std::vector<int> arriving)
      : schedule_(schedule), stage_(stage), arriving_(std::move(arriving)) {}

  void complete(Instruction& instruction) {
    const Kind kind = instruction.kind;
    if (kind == Kind::kLoadMicroBatch) {
      instruction.micro_batch = loads_++;
      loaded_[instruction.buffer] = instruction.micro_batch;
      if (stage_ == 0) held_[instruction.buffer] = instruction.micro_batch;
    } else if (kind == Kind::kReceiveActivation) {
      if (receives_ == arriving_.size())
        refuse(instruction, "receives activation ", receives_ + 1, ", but the stage before sends ", arriving_.size());
      instruction.micro_batch = held_[instruction.buffer] = arriving_[receives_++];
    } else if (is_computation(kind) || is_send(kind) || is_receive(kind)) {
      const auto held = held_.find(instruction.buffer);
      if (held == held_.end()) refuse(instruction, "has nothing in its buffer; load or receive into it before");
      instruction.micro_batch = held->second;
    }
    if (kind == Kind::kForward && loaded_.contains(instruction.buffer) &&
        loaded_[instruction.buffer] != instruction.micro_batch)
      refuse(instruction, "computes micro-batch ", instruction.micro_batch, " with the labels of ",
             loaded_[instruction.buffer], "; load in the order in which activations arrive");
    const bool goes_back = kind == Kind::kSendGradient || kind == Kind::kReceiveActivation;
    if (is_send(kind) || is_receive(kind)) instruction.peer = goes_back ? stage_ - 1 : stage_ + 1;
    if (kind == Kind::kSendActivation) sent_.push_back(instruction.micro_batch);
  }

  const std::vector<int>& sent() const { return sent_; }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Instruction& instruction, const Parts&... parts) const {
    throw ConfigError(str("schedule '", schedule_.name, "': stage ", stage_, "'s ", name_of(instruction.kind),
                          "(buffer=", instruction.buffer, ") ", parts...));
  }

  const Schedule& schedule_;
  const int stage_;
  const std::vector<int> arriving_;
  size_t receives_ = 0;
  int loads_ = 0;
  std::map<int, int> held_, loaded_;  // micro-batch whose activations, or labels, are in a buffer
  std::vector<int> sent_;
};

}  // namespace

Schedule follow_buffers(Schedule schedule) {
  std::vector<int> arriving;
  for (size_t stage = 0; stage < schedule.streams.size(); ++stage) {
    StageBuffers buffers(schedule, static_cast<int>(stage), std::move(arriving));
    for (Step& step : schedule.streams[stage])
      for (Instruction& instruction : step) buffers.complete(instruction);
    arriving = buffers.sent();
  }
  return schedule;
}

}  // namespace trireme::pipeline
