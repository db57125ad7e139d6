#include "trireme/schedule/schedule.h"

#include "trireme/base/error.h"

namespace trireme::pipeline {

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
