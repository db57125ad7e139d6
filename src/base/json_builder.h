// Shared by the readers of JSON and of Hjson: where an error is, and the value that is being built.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/utf8.h"

namespace trireme {

// JSON has no infinity, yet `1e999` and Python's `Infinity` are written for it. The parser refuses both, so they are
// replaced by this text, no longer than either, and the number that it stands for becomes an infinity again.
inline constexpr std::string_view kInfinityText = "9e307";
inline constexpr double kInfinityValue = 9e307;

struct TextPlace {
  size_t line = 1, column = 1;
  std::string_view text;  ///< the whole line
};

inline TextPlace place_of(std::string_view text, size_t offset) {
  offset = std::min(offset, text.size());
  TextPlace place;
  size_t begin = 0;
  for (size_t i = 0; i < offset; ++i) {
    if (text[i] != '\n') continue;
    ++place.line;
    begin = i + 1;
  }
  place.column = offset - begin + 1;
  place.text = text.substr(begin, text.find_first_of("\r\n", begin) - begin);
  return place;
}

/// Lines of offsets that ascend, each byte looked at once.
class LineCount {
 public:
  explicit LineCount(std::string_view text) : text_(text) {}
  int at(size_t offset) {
    line_ += static_cast<int>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(seen_),
                                         text_.begin() + static_cast<std::ptrdiff_t>(offset), '\n'));
    seen_ = offset;
    return line_;
  }

 private:
  const std::string_view text_;
  size_t seen_ = 0;
  int line_ = 1;
};

/// Knows the line that the reader has come to, so that of two readers of one text the one that got further can say what
/// is wrong.
class SyntaxError : public ConfigError {
 public:
  SyntaxError(const std::string& message, size_t line) : ConfigError(message), line_(line) {}
  size_t line() const { return line_; }

 private:
  size_t line_;
};

/// `reached` is how far the reader has come, where that is beyond the mistake at `offset`. Bytes of a binary file are
/// not shown.
[[noreturn]] inline void syntax_error(std::string_view text, const std::string& origin, size_t offset,
                                      const std::string& reason, size_t reached = 0) {
  if (text.find('\0') != std::string_view::npos)
    throw SyntaxError(str(origin, ": a binary file, where text is expected; give the path of another file"), 1);
  const TextPlace place = place_of(text, offset);
  // A line that is as long as a file is shown from a little before the mistake on.
  constexpr size_t kShownBefore = 120;
  const size_t begin = place.column - 1 > kShownBefore ? place.column - 1 - kShownBefore : 0;
  throw SyntaxError(str(origin, ":", place.line, ":", place.column, ": ", excerpt(reason, 1000), "\n    ",
                        excerpt(place.text.substr(std::min(begin, place.text.size()))), "\n    ",
                        std::string(place.column - 1 - begin, ' '), "^"),
                    place_of(text, std::max(offset, reached)).line);
}

/// Builds the value from the parser's events and knows the path of the key that it is at.
class JsonBuilder : public nlohmann::json_sax<Json> {
 public:
  JsonBuilder(std::string_view text, const std::string& origin, const JsonLimits& limits = {})
      : text_(text), origin_(origin), limits_(limits) {}
  Json take() { return std::move(root_); }

  /// The path of the key that was read last: "optimizer.params.betas[1]".
  std::string path() const {
    std::string result;
    for (const Level& level : levels_) {
      if (level.value->is_array()) {
        result += str("[", level.value->size() - 1, "]");
      } else {
        result += (result.empty() ? "" : ".") + level.key;
      }
    }
    return result;
  }

  /// At least the bytes of path(), known without making it.
  size_t path_bytes() const { return levels_.empty() ? 0 : levels_.back().bytes_above + levels_.back().key.size() + 1; }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(int64_t value) override { return put(value); }
  bool number_unsigned(uint64_t value) override { return put(value); }
  bool number_float(double value, const std::string&) override {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    if (value == kInfinityValue) value = infinity;
    if (value == -kInfinityValue) value = -infinity;
    return put(value);
  }
  bool string(std::string& value) override { return put(std::move(value)); }
  bool binary(Json::binary_t&) override { return false; }  // not in JSON text

  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    Level& level = levels_.back();
    if (name.size() > limits_.key_bytes)
      throw ConfigError(str(origin_, ": a key of ", name.size(), " bytes, `", excerpt(name, 40), "`; at most ",
                            limits_.key_bytes, " are read"));
    level.key = name;
    if (level.seen.insert(name).second) return true;
    throw ConfigError(str(origin_, ": the key `", path(), "` stands twice; remove one of the two"));
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    const std::string message = error.what();
    const size_t reason = message.find("syntax error");
    // nlohmann counts the characters that it has read, the offending one included.
    syntax_error(text_, origin_, position > 0 ? position - 1 : 0,
                 reason == std::string::npos ? message : message.substr(reason));
  }

 protected:
  bool put(Json value) {
    place(std::move(value));
    return true;
  }

 private:
  struct Level {
    Json* value;
    std::string key;                       ///< of an object: the key being read
    std::unordered_set<std::string> seen;  ///< of an object: ordered_json itself would search linearly
    size_t bytes_above;                    ///< of the path down to it
  };

  // A parent does not grow while its child is open, so the pointer stays good.
  Json* place(Json&& value) {
    if (++values_ > limits_.values)
      throw ConfigError(str(origin_, ": more than ", limits_.values, " values; give the path of another file"));
    if (levels_.empty()) return &(root_ = std::move(value));
    Json& parent = *levels_.back().value;
    if (parent.is_array()) return &parent.get_ref<Json::array_t&>().emplace_back(std::move(value));
    return &parent.get_ref<Json::object_t&>().emplace_back(levels_.back().key, std::move(value)).second;
  }
  bool open(Json value) {
    if (levels_.size() >= limits_.levels)
      throw ConfigError(str(origin_, ": objects and lists inside of each other, nested deeper than ", limits_.levels,
                            " levels", levels_.empty() ? "" : str(", in `", excerpt(path(), 100), "`")));
    const size_t bytes_above = path_bytes();
    levels_.push_back({place(std::move(value)), {}, {}, bytes_above});
    return true;
  }
  bool close() {
    levels_.pop_back();
    return true;
  }

  const std::string_view text_;
  const std::string& origin_;
  const JsonLimits limits_;
  size_t values_ = 0;
  Json root_;
  std::vector<Level> levels_;
};

}  // namespace trireme
