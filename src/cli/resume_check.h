// Whether a run can be continued with the flags that were given.
#pragma once

#include <cstdint>
#include <string>

#include "cli/train_setup.h"

namespace trireme::cli {

/// Compares `setup` with what the latest checkpoint of its folder says of its own run. Local; reads no tensor.
///
/// Throws    ConfigError naming the flag: another --seq, --model, --seed or --data, or no checkpoint of
///           `trireme train`; CheckpointError: a damaged manifest.
void check_resume(const TrainSetup& setup);

/// The point at which a checkpoint was saved.
struct SavedPosition {
  int64_t steps = 0;
  int64_t samples = 0;  ///< of training, read by all ranks together
};

/// The position of the checkpoint that check_resume() has compared; the beginning where there is none. Local.
SavedPosition saved_position(const TrainSetup& setup);

/// The hint for an error of a checkpoint that does not load: the flag, and the tags that there are; empty without
/// any.
std::string other_tags_hint(const TrainSetup& setup);

}  // namespace trireme::cli
