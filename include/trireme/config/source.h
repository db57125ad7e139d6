// A configuration between its file and its Config: keys in one schema whatever the dialect, and where they stand.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/config/config.h"

namespace trireme {

/// A key of a file.
struct ConfigPlace {
  std::string file;
  int line = 0;  ///< from 1; 0: unknown
};

/// One of the things that are wrong with a configuration.
struct ConfigMistake {
  std::string message;  ///< as read_config() throws it
  ErrorCode code = ErrorCode::kConfig;
  int line = 0;           ///< of its key in the file, from 1; 0: unknown
  std::string file = {};  ///< where it is not the source's origin: a file that the source names
};

/// A configuration before its values are checked, in the keys of docs/config.md whatever the file's dialect is.
struct ConfigSource {
  Json options;
  std::string origin = "<json>";                   ///< opens every error
  std::map<std::string, int> lines = {};           ///< line of each key of the file, from 1
  std::map<std::string, std::string> names = {};   ///< key here -> key of the file, where the two differ
  std::map<std::string, ConfigPlace> places = {};  ///< keys here that stand in another file, which this one names
  std::vector<std::string> without_meaning = {};   ///< keys of the file that change nothing here
  std::vector<std::string> hints = {};             ///< other remarks for the user
  std::vector<ConfigMistake> mistakes = {};        ///< in keys that there are in the file's dialect alone
  std::optional<int64_t> micro_batch = {};  ///< where no batch size is given, because the dialect has no word for it
};

/// Reads a file of DeepSpeed's (JSON or Hjson) or of Hugging Face Accelerate's (YAML, by a name that ends in .yaml or
/// .yml, or JSON).
/// Throws    IoError: it cannot be read; ConfigError: its syntax.
ConfigSource read_source(const std::filesystem::path& path);
/// As read_source(), from text. `origin` is its path, or opens every error.
ConfigSource parse_source(std::string_view text, const std::string& origin);
/// From parsed JSON in either form, or like a FullyShardedDataParallelPlugin of Accelerate's.
ConfigSource source_from_json(Json json, const std::string& origin = "<json>", std::map<std::string, int> lines = {});

/// Whether `json` has the keys of Accelerate, of its files or of its FullyShardedDataParallelPlugin.
bool is_accelerates(const Json& json);

/// The options, with a batch size where the dialect has no word for it; logs the remarks on a file of Accelerate.
/// Throws ConfigError: the first of its mistakes.
Json options_of(const ConfigSource& source);

/// As read_config, of which it is the second half.
Config config_from_source(const ConfigSource& source, int world_size, const Degrees& degrees = {});

/// Everything that is wrong with it, in the order of the lines; config_from_source() throws one of them. Empty: it is
/// good.
std::vector<ConfigMistake> mistakes_in(const ConfigSource& source, int world_size, const Degrees& degrees = {});

/// Every key, its values, default and effect, as tables in Markdown: a part of docs/config.md.
std::string keys_page();

}  // namespace trireme
