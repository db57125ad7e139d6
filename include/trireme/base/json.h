// JSON as the configuration and the manifests need it. Include <nlohmann/json.hpp> only in the .cpp that reads values.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace trireme {

/// Keeps the order of keys, so that what is written back reads like what was read.
using Json = nlohmann::ordered_json;

/// Parses JSON with //, /* */ and # comments. `origin` (a path, or "<string>") opens every error message.
/// `Infinity` and numbers beyond a double's range (`1e999`) are read as infinite.
///
/// Throws    ConfigError: a syntax error with line, column and the line itself; a key that stands twice in one object, by its path.
Json parse_json(std::string_view text, const std::string& origin);

/// Reads and parses a file. Throws IoError when it cannot be read, ConfigError as parse_json.
Json read_json(const std::filesystem::path& path);

}  // namespace trireme
