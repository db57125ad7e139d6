// Whether a run can be continued with the flags that were given.
#pragma once

#include <string>

#include "cli/train_setup.h"

namespace trireme::cli {

/// Compares `setup` with what the latest checkpoint of its folder says of its own run. Local; reads no tensor.
///
/// Throws    ConfigError naming the flag: another --seq, --model, --seed or --data, or no checkpoint of
///           `trireme train`; CheckpointError: a damaged manifest.
void check_resume(const TrainSetup& setup);

/// The hint for an error of a checkpoint that does not load: the flag, and the tags that there are; empty without
/// any.
std::string other_tags_hint(const TrainSetup& setup);

}  // namespace trireme::cli
