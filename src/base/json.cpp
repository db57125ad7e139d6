#include "trireme/base/json.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme {
namespace {

// JSON has no infinity, yet `1e999` and Python's `Infinity` are written for it. The parser refuses both, so they are
// replaced by this text, no longer than either, and the number that it stands for becomes an infinity again.
constexpr std::string_view kInfinityText = "9e307";
constexpr double kInfinityValue = 9e307;

struct Place {
  size_t line = 1, column = 1;
  std::string_view text;  ///< the whole line
};

Place place_of(std::string_view text, size_t offset) {
  offset = std::min(offset, text.size());
  Place place;
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

[[noreturn]] void syntax_error(std::string_view text, const std::string& origin, size_t offset,
                               const std::string& reason) {
  const Place place = place_of(text, offset);
  throw ConfigError(str(origin, ":", place.line, ":", place.column, ": ", reason, "\n    ", place.text, "\n    ",
                        std::string(place.column - 1, ' '), "^"));
}

/// Blanks comments and replaces infinities, leaving every other byte at its place, so that offsets stay true.
class Cleaner {
 public:
  Cleaner(std::string_view text, const std::string& origin) : text_(text), origin_(origin), clean_(text) {}

  std::string run() {
    while (at_ < text_.size()) step();
    return std::move(clean_);
  }

 private:
  void step() {
    const char c = text_[at_];
    if (c == '"') return skip_string();
    if (c == '#' || starts_with("//")) return blank_until(std::min(text_.find('\n', at_), text_.size()));
    if (starts_with("/*")) return blank_block();
    if (std::isalnum(static_cast<unsigned char>(c))) return number_or_word();
    ++at_;
  }

  bool starts_with(std::string_view what) const { return text_.substr(at_, what.size()) == what; }

  void skip_string() {
    for (++at_; at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\n'; ++at_)
      if (text_[at_] == '\\') ++at_;
    ++at_;
  }

  void blank_block() {
    const size_t end = text_.find("*/", at_ + 2);
    if (end == std::string_view::npos) syntax_error(text_, origin_, at_, "comment without its end `*/`");
    blank_until(end + 2);
  }

  void blank_until(size_t end) {
    for (; at_ < end; ++at_) clean_[at_] = ' ';
  }

  void number_or_word() {
    const size_t begin = at_;
    while (at_ < text_.size() && belongs_to_token(text_[at_])) ++at_;
    const std::string token(text_.substr(begin, at_ - begin));
    if (token != "Infinity" && !overflows(token)) return;
    std::fill(clean_.begin() + begin, clean_.begin() + at_, ' ');
    std::copy(kInfinityText.begin(), kInfinityText.end(), clean_.begin() + begin);
  }

  static bool belongs_to_token(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '+' || c == '-' || c == '.';
  }
  static bool overflows(const std::string& token) {
    return std::isdigit(static_cast<unsigned char>(token[0])) && std::isinf(std::strtod(token.c_str(), nullptr));
  }

  const std::string_view text_;
  const std::string& origin_;
  std::string clean_;
  size_t at_ = 0;
};

/// Builds the value from the parser's events and knows the path of the key that it is at.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(std::string_view text, const std::string& origin) : text_(text), origin_(origin) {}
  Json take() { return std::move(root_); }

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

 private:
  struct Level {
    Json* value;
    std::string key;                       ///< of an object: the key being read
    std::unordered_set<std::string> seen;  ///< of an object: ordered_json itself would search linearly
  };

  // A parent does not grow while its child is open, so the pointer stays good.
  Json* place(Json&& value) {
    if (levels_.empty()) return &(root_ = std::move(value));
    Json& parent = *levels_.back().value;
    if (parent.is_array()) return &parent.get_ref<Json::array_t&>().emplace_back(std::move(value));
    return &parent.get_ref<Json::object_t&>().emplace_back(levels_.back().key, std::move(value)).second;
  }
  bool put(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    levels_.push_back({place(std::move(value)), {}, {}});
    return true;
  }
  bool close() {
    levels_.pop_back();
    return true;
  }

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

  const std::string_view text_;
  const std::string& origin_;
  Json root_;
  std::vector<Level> levels_;
};

}  // namespace

Json parse_json(std::string_view text, const std::string& origin) {
  const std::string clean = Cleaner(text, origin).run();
  Builder builder(text, origin);
  Json::sax_parse(clean, &builder);
  return builder.take();
}

Json read_json(const std::filesystem::path& path) { return parse_json(posix_file_system().read(path), path.string()); }

}  // namespace trireme
