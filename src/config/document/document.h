// A configuration while it is being read: values by their paths, mistakes, and remarks for the user.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/config/document/config_source.h"

namespace trireme {

struct IntegerRange {
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
  const char* words = "an integer";
};

struct NumberRange {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  const char* words = "a number";
};

inline constexpr IntegerRange kCount = {.min = 0, .words = "an integer >= 0"};
inline constexpr IntegerRange kShardSize = {.min = -1, .words = "a number of ranks, or -1"};
inline constexpr IntegerRange kPositive = {.min = 1, .words = "an integer >= 1"};
inline constexpr NumberRange kNonNegative = {
    .min = 0, .max = std::numeric_limits<double>::max(), .words = "a finite number >= 0"};

std::string lower_case(std::string text);

/// The value at a path such as "a.b", or nullptr.
const Json* value_at(const Json& json, const std::string& path);
Json* value_at(Json& json, const std::string& path);

/// The one of `choices` that equals `text` but for case, or nullptr.
const std::string* find_ignoring_case(const std::string& text, const std::vector<std::string>& choices);

/// A mistake and the key that it is about.
class KeyError : public ConfigError {
 public:
  KeyError(const std::string& message, ErrorCode code, std::string key, ConfigPlace place = {})
      : ConfigError(message, code), key_(std::move(key)), place_(std::move(place)) {}
  const std::string& key() const { return key_; }
  /// Without a file: in the one that is read.
  const ConfigPlace& place() const { return place_; }

 private:
  std::string key_;  ///< path, as the file spells it
  ConfigPlace place_;
};

/// Values are found by their paths, such as "zero_optimization.stage"; null and "auto" read as absent.
/// Every ConfigError names origin, path, value and the expected values.
class Document {
 public:
  /// `names`: path -> key in the file, where the two differ. `places`: of paths that stand in another file.
  Document(Json json, std::string origin, std::map<std::string, std::string> names = {},
           std::map<std::string, ConfigPlace> places = {});

  /// Nothing where it is absent.
  const Json* find(const std::string& path) const;
  bool has(const std::string& path) const { return find(path) != nullptr; }
  bool is_auto(const std::string& path) const;

  bool flag_or(const std::string& path, bool fallback, const char* expected = "true or false") const;
  int64_t integer_or(const std::string& path, int64_t fallback, const IntegerRange& range) const;
  double number_or(const std::string& path, double fallback, const NumberRange& range) const;
  /// Ignores case; returns the spelling in `choices`.
  std::string choice_or(const std::string& path, const std::string& fallback,
                        const std::vector<std::string>& choices) const;
  std::string text_or(const std::string& path, const std::string& fallback) const;
  std::vector<std::string> texts_or(const std::string& path, const std::vector<std::string>& fallback) const;

  /// Lets `name` stand for `path`; both together are an error.
  void rename(const std::string& name, const std::string& path);
  /// Puts `value` at `path`, whose section there is.
  void replace(const std::string& path, Json value);
  /// Lets errors call `path` by another name.
  void call(const std::string& path, const std::string& name) { names_[path] = path_of(name); }

  /// `path` as the file spells it.
  std::string path_of(const std::string& path) const;
  const std::string& origin() const { return origin_; }
  const Json& json() const { return json_; }

  [[noreturn]] void fail(const std::string& path, const std::string& expected) const;
  [[noreturn]] void not_there_yet(const std::string& path, const std::string& fix) const;
  [[noreturn]] void refuse(const std::string& path, const std::string& message,
                           ErrorCode code = ErrorCode::kConfig) const;

  /// Runs `read`; the ConfigError that it throws becomes one of mistakes().
  template <class Read>
  void attempt(const Read& read) {
    try {
      read();
    } catch (const KeyError& error) {
      mistakes_.push_back(error);
    } catch (const ConfigError& error) {
      mistakes_.emplace_back(error.what(), error.code(), "");
    }
  }
  /// Whether a mistake is about one of these keys, or a key inside of one: then nothing follows from their values.
  bool is_mistaken(const std::vector<std::string>& paths) const;
  std::vector<KeyError>& mistakes() { return mistakes_; }

  std::vector<std::string> warnings;         ///< deprecated spellings
  std::vector<std::string> without_meaning;  ///< keys that were given and change nothing here
  std::vector<std::string> hints;            ///< other remarks about keys that were given

 private:
  Json json_;
  std::string origin_;
  std::map<std::string, std::string> names_;
  std::map<std::string, ConfigPlace> places_;
  std::vector<KeyError> mistakes_;
};

/// `lines`: of the file's keys; the nearest section's where the key has none.
ConfigMistake mistake_of(const KeyError& error, const std::map<std::string, int>& lines);

}  // namespace trireme
