// The stages on which a step function's model would lie, before it is made.
#pragma once

#include <cstdint>
#include <string>

namespace trireme::cli {

struct HomesFlags {
  int stages = 2;
  std::string model;           ///< a built-in name, or the path of a config.json
  int64_t tokens = 1024;       ///< of a sequence
  double memory_weight = 0.8;  ///< as `memory_weight` of smp's configuration
};

/// The homes of a model's layers by the ordered cut of smp, from closed forms in place of a trace.
/// Throws    ConfigError: an unknown model, a stage or weight out of range.
std::string homes_text(const HomesFlags& flags);

}  // namespace trireme::cli
