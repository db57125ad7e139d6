#include "trireme/schedule/schedule.h"

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::pipeline {

int Schedule::parts() const {
  return order == PartOrder::kListed ? static_cast<int>(stage_of_part.size()) : stages * chunks;
}

int Schedule::part_of(int stage, int chunk) const {
  if (order != PartOrder::kListed)
    return order == PartOrder::kV && chunk == 1 ? parts() - 1 - stage : chunk * stages + stage;
  int part = 0;
  for (int seen = 0; part < parts() && (stage_of_part[part] != stage || seen++ < chunk); ++part) {
  }
  return part;
}

int Schedule::stage_of(int part) const {
  if (order == PartOrder::kListed) return stage_of_part.at(part);
  return order == PartOrder::kV && part >= stages ? parts() - 1 - part : part % stages;
}

int Schedule::chunk_of(int part) const {
  if (order != PartOrder::kListed) return part / stages;
  return static_cast<int>(std::count(stage_of_part.begin(), stage_of_part.begin() + part, stage_of_part.at(part)));
}

int Schedule::chunks_of(int stage) const {
  if (order != PartOrder::kListed) return chunks;
  return static_cast<int>(std::ranges::count(stage_of_part, stage));
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kLoadMicroBatch:
      return "LoadMicroBatch";
    case Kind::kReceiveActivation:
      return "RecvActivation";
    case Kind::kSendActivation:
      return "SendActivation";
    case Kind::kForward:
      return "ForwardPass";
    case Kind::kReceiveGradient:
      return "RecvGrad";
    case Kind::kSendGradient:
      return "SendGrad";
    case Kind::kBackward:
      return "BackwardPass";
    case Kind::kBackwardInput:
      return "BackwardInput";
    case Kind::kBackwardWeight:
      return "BackwardWeight";
    case Kind::kReduceTiedGradients:
      return "ReduceTiedGrads";
    case Kind::kReduceGradients:
      return "ReduceGrads";
    case Kind::kStep:
      return "OptimizerStep";
  }
  return "?";
}

Kind kind_of(const std::string& name) {
  std::string names;
  for (int index = 0; index <= static_cast<int>(Kind::kStep); ++index) {
    const Kind kind = static_cast<Kind>(index);
    if (name == name_of(kind)) return kind;
    names += str(names.empty() ? "" : ", ", name_of(kind));
  }
  throw ConfigError(str("schedule: '", name, "' is no instruction; use one of ", names));
}

std::string to_text(const Instruction& instruction) {
  std::string text = name_of(instruction.kind);
  if (instruction.micro_batch < 0) return text;
  text += str("(micro_batch=", instruction.micro_batch, ", chunk=", instruction.chunk);
  if (instruction.buffer >= 0) text += str(", buffer=", instruction.buffer);
  if (instruction.peer >= 0) text += str(", peer=", instruction.peer);
  return text + ")";
}

}  // namespace trireme::pipeline
