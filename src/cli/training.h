// The training loop behind `trireme train`: also an example of the library's use.
#pragma once

#include "cli/train_setup.h"
#include "trireme/comm/world.h"

namespace trireme::cli {

/// Trains on all ranks of `world`, saves, evaluates, writes a sample and the report. Collective.
///
/// Rank 0 ends its stdout with "validation loss X". Returns the exit code: 0, or 128 + signal after an interruption,
/// which was saved as well.
int run_training(const TrainSetup& setup, World& world);

}  // namespace trireme::cli
