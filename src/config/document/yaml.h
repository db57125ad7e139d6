// YAML as JSON values, with the line of each key.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "trireme/base/json.h"

namespace trireme {

struct YamlText {
  Json json;
  std::map<std::string, int> lines;  ///< of each key, by its path, from 1
};

/// Plain scalars are what YAML 1.1 takes them for (`no` is false), those in quotes are texts.
/// Throws    ConfigError: a syntax error, with line and column; a key that stands twice, or is no text; bytes that are
///           no UTF-8; more than 200,000 values (what an alias repeats counts again) or 100 levels of nesting.
YamlText parse_yaml(const std::string& text, const std::string& origin);

/// The text of a mapping; what nests are mappings and scalars.
std::string to_yaml(const Json& json);

}  // namespace trireme
