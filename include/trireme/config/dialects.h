// Configurations in the words of FSDP and of DeepSpeed: which key of one is which of the other.
#pragma once

#include <string>
#include <vector>

#include "trireme/config/source.h"

namespace trireme {

enum class Dialect {
  kDeepSpeed,  ///< DeepSpeed's JSON, whose keys are this library's own
  kFsdp,       ///< a YAML file of Hugging Face Accelerate with `distributed_type: FSDP`
};

struct Conversion {
  std::string text;  ///< of a file in the other dialect
  /// By key, the settings that this dialect has no word for, and what to do instead.
  std::vector<std::string> left_out;
};

/// The configuration in another dialect. `world_size`: the ranks that its batch sizes are for.
/// Throws ConfigError as config_from_source().
Conversion convert(const ConfigSource& source, Dialect to, int world_size = 1);

/// The keys of FSDP beside those of DeepSpeed and those here, as a table in Markdown: a part of docs/config.md.
std::string dialect_map();

}  // namespace trireme
