// Files of Hugging Face Accelerate, and dicts like its FullyShardedDataParallelPlugin.
#pragma once

#include <string>

#include "trireme/config/document/config_source.h"

namespace trireme {

/// Replaces Accelerate's keys by those here. Mistakes in them become the source's.
void read_accelerate(ConfigSource& source);

/// A file of Accelerate for the resolved options of to_json(): with FSDP, or at ZeRO stage 0 with
/// DistributedDataParallel. `replicas`: copies that MiCS makes. Only those settings that it has words for are in it.
std::string write_accelerate(const Json& resolved, int replicas);

/// As dialect_map().
std::string accelerate_table();

}  // namespace trireme
