// Helpers that the tests of the configuration share: the error of a text.
#pragma once

#include <ostream>
#include <string>

#include "trireme/base/error.h"
#include "trireme/config/config.h"

namespace trireme {

/// A valid configuration with `keys` added, for `world_size` ranks.
inline Config read_with(const std::string& keys, int world_size = 1) {
  return parse_config("{\"train_micro_batch_size_per_gpu\": 1, " + keys + "}", world_size);
}

struct Refusal {
  ErrorCode code = ErrorCode::kInternal;
  std::string message = "no error";
  bool operator==(const Refusal&) const = default;
};

inline void PrintTo(const Refusal& refusal, std::ostream* out) {
  *out << name_of(refusal.code) << ": " << refusal.message;
}

/// The error that `text` gives, without the origin `<string>: `.
inline Refusal refusal_of_text(const std::string& text, int world_size = 1) {
  try {
    parse_config(text, world_size);
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    const std::string origin = "<string>: ";
    return {error.code(), message.rfind(origin, 0) == 0 ? message.substr(origin.size()) : message};
  }
  return {};
}

inline Refusal refusal_of(const std::string& keys, int world_size = 1) {
  return refusal_of_text("{\"train_micro_batch_size_per_gpu\": 1, " + keys + "}", world_size);
}

inline Refusal wrong(const std::string& message) { return {ErrorCode::kConfig, message}; }
inline Refusal not_there(const std::string& message) { return {ErrorCode::kUnsupported, message}; }

}  // namespace trireme
