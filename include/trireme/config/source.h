// A configuration is read in two stages: from its file to a ConfigSource, and from that to a Config.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/json.h"
#include "trireme/config/config.h"
#include "trireme/config/document/config_source.h"

namespace trireme {

/// Reads a file of DeepSpeed's (JSON or Hjson) or of Hugging Face Accelerate's (YAML, by a name that ends in .yaml or
/// .yml, or JSON).
/// Throws    IoError: it cannot be read; ConfigError: its syntax.
ConfigSource read_source(const std::filesystem::path& path);
/// As read_source(), from text. `origin` is its path, or opens every error.
ConfigSource parse_source(std::string_view text, const std::string& origin);
/// From parsed JSON in either form, or like a FullyShardedDataParallelPlugin of Accelerate's.
ConfigSource source_from_json(Json json, const std::string& origin = "<json>", std::map<std::string, int> lines = {});

/// Lets errors about `source` name keys as the file `path` does from which its options once came, and their lines.
void name_as_in_file(ConfigSource& source, const std::filesystem::path& path);

/// The source's options, with its micro-batch where the dialect has no key for a batch size. Logs the remarks on a file
/// of Accelerate.
/// Throws    ConfigError: the source's mistakes.
Json options_of(const ConfigSource& source);

/// The second half of read_config(). Throws as that.
Config config_from_source(const ConfigSource& source, int world_size, const Degrees& degrees = {});

/// All mistakes of a source, by line; config_from_source() throws them. Empty: there are none.
std::vector<ConfigMistake> mistakes_in(const ConfigSource& source, int world_size, const Degrees& degrees = {});

/// A line for each: "FILE:LINE: …". `origin` is the source's; one such as <string> is no file, and has no lines.
std::string text_of(const std::vector<ConfigMistake>& mistakes, const std::string& origin);

/// Every key, its values, default and effect, as tables in Markdown: a part of docs/config.md.
std::string keys_page();

}  // namespace trireme
