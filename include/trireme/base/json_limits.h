// Limits of what a text from outside is made of, so that neither stack, memory nor time runs out; and the JSON of
// programs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "trireme/base/json.h"

namespace trireme {

/// Limits of a text. Beyond them functions over values would need more stack, memory or time than the text is
/// worth: each level of nesting is a call, and each value some hundred bytes.
struct JsonLimits {
  size_t levels = 500;        ///< of objects and lists inside of each other
  size_t values = 200'000;    ///< objects, lists, texts and numbers
  size_t key_bytes = 10'000;  ///< of one key
};

/// Limits of values that a program saves beside its tensors: as many as it likes, in levels that leave room for those
/// of the file that they are saved in.
inline constexpr JsonLimits kSavedValues = {.levels = 400, .values = SIZE_MAX, .key_bytes = SIZE_MAX};

/// Paths of keys that are kept for each key are no longer: long names of sections times many keys would be gigabytes.
inline constexpr size_t kMostPathBytes = 200;

/// parse_json() within other limits than those of a configuration. Throws ConfigError: more than `limits` allows.
Json parse_json(std::string_view text, const std::string& origin, const JsonLimits& limits);

/// Parses the JSON that a program wrote, without comments and infinities, in time and memory in proportion to it; a
/// discarded value where it is none, has a key twice, or nests deeper than `most_levels`.
Json parse_plain_json(std::string_view text, size_t most_levels = JsonLimits{}.levels);

/// The same for JSON that this library has made or checked before; anything else is a bug.
Json parse_own_json(std::string_view text);

/// The text of a configuration or of another file that people write.
/// Throws    IoError: it cannot be read, is no regular file, or is longer than such texts are (4 MiB).
std::string read_config_text(const std::filesystem::path& path);

}  // namespace trireme
