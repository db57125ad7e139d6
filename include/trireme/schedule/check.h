// Proof that a schedule can be executed, before it is.
#pragma once

#include <vector>

#include "trireme/schedule/schedule.h"

namespace trireme::pipeline {

/// Parts that share parameters.
struct TiedParts {
  std::vector<std::vector<int>> parts = {};  ///< of each tie, ascending: the owner's, then those of its copies
  bool each_micro_batch = false;  ///< copies send gradients to the owner in each backward pass, not only in the last
};

/// When stages wait for each other.
enum class Waits : uint8_t {
  kReceives,  ///< a receiver waits for the message; a sender continues at once
  kBarriers,  ///< the same, and all stages meet after each step
};

/// Returns if the order of messages, buffers and computations is sound: each stage receives what its peer sends, in
/// that order; no stage waits for ever; each micro-batch passes each part once, forward before backward; no buffer is
/// overwritten while it is needed.
///
/// Throws    ConfigError that names two instructions, with their stages, which do not match or wait for each other.
void check(const Schedule& schedule, Waits waits = Waits::kReceives);

/// To call after check(): returns if the schedule trains. Each stage steps once, after its last backward pass and with
/// no reduction of gradients before that; micro-batches are loaded before the forward passes of the first and the last
/// part. No stage waits for ever when the owner of tied parameters waits for the gradients of their copies.
///
/// Throws    ConfigError that names the instruction.
void check_training(const Schedule& schedule, const TiedParts& ties = {});

}  // namespace trireme::pipeline
