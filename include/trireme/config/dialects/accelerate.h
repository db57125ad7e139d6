// How a configuration of Hugging Face Accelerate's is told from one of DeepSpeed's.
#pragma once

#include "trireme/base/json.h"

namespace trireme {

/// Whether `json` has the keys of Accelerate, of its files or of its FullyShardedDataParallelPlugin.
bool is_accelerates(const Json& json);

}  // namespace trireme
