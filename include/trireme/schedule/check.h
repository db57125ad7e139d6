// Proof that a schedule can be executed, before it is.
#pragma once

#include <vector>

#include "trireme/schedule/schedule.h"

namespace trireme::pipeline {

/// Parts that share parameters.
struct TiedParts {
  std::vector<std::vector<int>> parts = {};  ///< of each tie, ascending: the owner's, then those of its copies
  bool each_micro_batch = false;  ///< gradients of copies go to the owner in each backward pass, not in the last one
};

/// How stages wait.
enum class Waits : uint8_t {
  kReceives,  ///< who receives waits for the message; who sends goes on
  kBarriers,  ///< the same, and all stages meet after each step
};

/// Returns where the order of messages, buffers and computations is sound: each direction of a pair of stages receives
/// what is sent, in that order; no stage waits for ever; each micro-batch passes each part once, forward before
/// backward; no buffer is overwritten while it is needed.
///
/// Throws    ConfigError that names the two instructions, with their stages, that do not fit each other or wait for
///           each other.
void check(const Schedule& schedule, Waits waits = Waits::kReceives);

/// After check(): the schedule trains. Each stage steps once, after its last backward pass and with no reduction of
/// gradients before that; what the first and the last part read is loaded before their forward passes. No stage waits
/// for ever where the owner of tied parameters waits for the gradients of their copies.
///
/// Throws    ConfigError that names the instruction.
void check_training(const Schedule& schedule, const TiedParts& ties = {});

}  // namespace trireme::pipeline
