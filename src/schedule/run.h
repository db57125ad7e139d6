// Goes through a schedule as stages would, without computing anything.
#pragma once

#include "trireme/schedule/check.h"
#include "trireme/schedule/simulate.h"

namespace trireme::pipeline {

/// Throws    ConfigError that names two instructions: stages wait for each other.
Timeline run(const Schedule& schedule, const PartTimes& times, Waits waits, const TiedParts& ties = {});

/// Whether the instruction is a message to `peer`, or from it.
bool is_send(Kind kind);
bool is_receive(Kind kind);
/// A forward or one of the backwards.
bool is_computation(Kind kind);

/// The contents of a message, the same for its send and its receive.
struct MessageContent {
  bool is_activation = true;
  int part = 0;  ///< whose output it is, or whose output's gradient
  int micro_batch = 0;
  auto operator<=>(const MessageContent&) const = default;
};
MessageContent content_of(const Schedule& schedule, int stage, const Instruction& instruction);

/// "stage 1's RecvActivation(micro_batch=3, chunk=0, buffer=1, peer=0)"
std::string name_of(int stage, const Instruction& instruction);

}  // namespace trireme::pipeline
