// Configurations in the words of FSDP and of DeepSpeed: which key of one is which of the other.
#pragma once

#include <string>
#include <vector>

#include "trireme/config/source.h"

namespace trireme {

/// The form of a configuration file.
enum class Dialect {
  kDeepSpeed,  ///< DeepSpeed's JSON, whose keys are this library's own
  kFsdp,       ///< a YAML file of Hugging Face Accelerate with `distributed_type: FSDP`
};

/// The result of convert().
struct Conversion {
  std::string text;  ///< of a file in the other dialect
  /// A line for each setting that the other dialect has no key for: the key, and what to do instead.
  std::vector<std::string> left_out;
};

/// The configuration in another dialect. `world_size`: the ranks that its batch sizes are for.
/// Throws ConfigError as config_from_source().
Conversion convert(const ConfigSource& source, Dialect to, int world_size = 1);

/// A table in Markdown, of docs/config.md: each key of FSDP with its counterparts in DeepSpeed and here.
std::string dialect_map();

}  // namespace trireme
