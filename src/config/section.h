// One object of the configuration while it is being read: typed getters, ranges, and what nobody asked for.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/json.h"

namespace trireme {

/// What a reader has to say besides the values; shared by all sections of one configuration.
struct ReadNotes {
  std::string origin;                        ///< file name; opens every error
  std::vector<std::string> warnings;         ///< deprecated spellings
  std::vector<std::string> without_meaning;  ///< paths of keys that change nothing here
  std::vector<std::string> hints;            ///< what else is good to know about keys that were given
};

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
inline constexpr IntegerRange kPositive = {.min = 1, .words = "an integer >= 1"};
inline constexpr NumberRange kNonNegative = {
    .min = 0, .max = std::numeric_limits<double>::max(), .words = "a finite number >= 0"};

/// The one of `choices` that equals `text` but for case, or nullptr.
const std::string* find_ignoring_case(const std::string& text, const std::vector<std::string>& choices);

enum class Spelling { kAlias, kDeprecated };

/// Each getter marks its key as known; finish() refuses the keys that are left. `null` and "auto" read as absent.
/// Every ConfigError names origin, path, value and what was expected.
class Section {
 public:
  /// `json` must be an object, or null for an absent section.
  Section(const Json& json, std::string path, ReadNotes& notes);

  /// Given, and neither null nor "auto".
  bool has(const std::string& key);
  bool is_auto(const std::string& key);

  bool flag_or(const std::string& key, bool fallback);
  int64_t integer_or(const std::string& key, int64_t fallback, const IntegerRange& range);
  double number_or(const std::string& key, double fallback, const NumberRange& range);
  /// Ignores case; returns the spelling in `choices`.
  std::string choice_or(const std::string& key, const std::string& fallback, const std::vector<std::string>& choices);
  std::string text_or(const std::string& key, const std::string& fallback);
  std::vector<std::string> texts_or(const std::string& key, const std::vector<std::string>& fallback);
  /// One text may stand without its list.
  std::vector<std::string> text_or_texts(const std::string& key, const std::vector<std::string>& fallback);
  /// Absent: an empty section.
  Section section(const std::string& key);
  /// The value itself, or nullptr when absent.
  const Json* value(const std::string& key);

  /// Lets `name` stand for `key`; both together are an error.
  void rename(const std::string& name, const std::string& key, Spelling spelling);
  /// Takes the key as known without reading it.
  void know(const std::string& key) { known_.insert(key); }

  /// Refuses what was never asked for, with the nearest key that was.
  void finish() const;

  /// Path of `key` as the file spells it.
  std::string path_of(const std::string& key) const;
  ReadNotes& notes() { return *notes_; }
  /// Notes that `key`, which was given, changes nothing here.
  void without_meaning(const std::string& key) { notes_->without_meaning.push_back(path_of(key)); }

  [[noreturn]] void fail(const std::string& key, const std::string& expected) const;
  [[noreturn]] void not_there_yet(const std::string& key, const std::string& fix) const;
  [[noreturn]] void refuse(const std::string& message, ErrorCode code = ErrorCode::kConfig) const;

 private:
  Json object_;
  std::string path_;
  ReadNotes* notes_;
  std::set<std::string> known_;
  std::map<std::string, std::string> spelled_;  ///< key -> the alias that the file has
};

}  // namespace trireme
