// Proof that a schedule can be executed, before it is.
#pragma once

#include "trireme/pipeline/schedule.h"

namespace trireme::pipeline {

/// How stages wait.
enum class Waits : uint8_t {
  kReceives,  ///< who receives waits for the message; who sends goes on
  kBarriers,  ///< the same, and all stages meet after each step
};

/// Returns where the order of messages, buffers and computations is sound: each direction of a pair of stages receives
/// what is sent, in that order; no stage waits for ever; each micro-batch passes each part once, forward before
/// backward; no buffer is overwritten while it is needed.
///
/// Throws    ConfigError that names the two instructions, with their stages, that do not fit each other or wait for each
///           other.
void check(const Schedule& schedule, Waits waits = Waits::kReceives);

}  // namespace trireme::pipeline
