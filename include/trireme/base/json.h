// JSON as the configuration and the manifests need it. Include <nlohmann/json.hpp> only in the .cpp that reads values.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace trireme {

/// Keeps the order of keys, so that what is written back reads like what was read.
using Json = nlohmann::ordered_json;

/// Parses JSON with //, /* */ and # comments. `origin` (a path, or "<string>") opens every error message.
/// `Infinity` and numbers beyond a double's range (`1e999`) are read as infinite.
///
/// Throws    ConfigError: a syntax error with line, column and the line itself; a key that stands twice in one object,
///           by its path.
Json parse_json(std::string_view text, const std::string& origin);

/// Reads and parses a file. Throws IoError when it cannot be read, ConfigError as parse_json.
Json read_json(const std::filesystem::path& path);

/// Parses Hjson, the superset of JSON in which people write configurations: comments, keys and texts without quotes or
/// in '…', texts of several lines in '''…''', commas that trail or are left out, the outermost braces left out. A value
/// that is neither in quotes nor a number, true, false or null is the text up to the end of its line.
///
/// Throws    ConfigError as parse_json. A text that is neither JSON nor Hjson gets the error of the parser that got to
///           the later line.
/// Source    https://hjson.github.io/syntax.html. Test: hjson_test.cpp; deepspeed_names_slow_test.py compares with
///           Python's hjson.
Json parse_hjson(std::string_view text, const std::string& origin);

/// Reads and parses a file. Throws IoError when it cannot be read, ConfigError as parse_hjson.
Json read_hjson(const std::filesystem::path& path);

/// The line of each key of a JSON or Hjson text, from 1, by its path such as "a.b"; a key of an object in a list is
/// "a[0].b". Empty where the text is neither.
std::map<std::string, int> key_lines(std::string_view text);

}  // namespace trireme
