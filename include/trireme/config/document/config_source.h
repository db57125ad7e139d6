// A configuration between its file and its Config: keys in one schema whatever the dialect, and where they stand.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/json.h"

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
  std::map<std::string, ConfigPlace> places = {};  ///< keys that come from another file, which this one names
  std::vector<std::string> without_meaning = {};   ///< keys of the file that change nothing here
  std::vector<std::string> hints = {};             ///< other remarks for the user
  std::vector<ConfigMistake> mistakes = {};        ///< in keys that only the file's dialect has
  std::optional<int64_t> micro_batch = {};         ///< where the dialect has no key for a batch size
  bool steps_in_the_models_dtype = false;  ///< FSDP: a model in bf16 has no fp32 masters, unless the file says so
};

}  // namespace trireme
