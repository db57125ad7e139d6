#include "trireme/base/json.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/json_builder.h"
#include "trireme/base/file.h"
#include "trireme/base/json_limits.h"

namespace trireme {
namespace {

constexpr size_t kMostConfigBytes = size_t{4} << 20;

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

/// Builds the value of a text in which no number stands for an infinity.
class PlainBuilder final : public JsonBuilder {
 public:
  using JsonBuilder::JsonBuilder;
  bool number_float(double value, const std::string&) override { return put(value); }
};

}  // namespace

Json parse_json(std::string_view text, const std::string& origin, const JsonLimits& limits) {
  const std::string clean = Cleaner(text, origin).run();
  JsonBuilder builder(text, origin, limits);
  Json::sax_parse(clean, &builder);
  return builder.take();
}

Json parse_json(std::string_view text, const std::string& origin) { return parse_json(text, origin, JsonLimits{}); }

Json parse_plain_json(std::string_view text, size_t most_levels) {
  const std::string origin;
  PlainBuilder builder(text, origin, {.levels = most_levels, .values = SIZE_MAX, .key_bytes = SIZE_MAX});
  try {
    Json::sax_parse(text, &builder);
    return builder.take();
  } catch (const ConfigError&) {
    return Json::parse("", nullptr, /*allow_exceptions=*/false);
  }
}

Json parse_own_json(std::string_view text) {
  Json json = parse_plain_json(text);
  TRIREME_CHECK(!json.is_discarded(), "not JSON: ", excerpt(text));
  return json;
}

std::string read_config_text(const std::filesystem::path& path) {
  const size_t bytes = posix_file_system().open(path)->bytes();
  if (bytes > kMostConfigBytes)
    throw IoError(str(path.string(), ": it has ", bytes, " bytes, and a configuration or a list of hosts at most ",
                      kMostConfigBytes, "; give the path of another file"));
  return posix_file_system().read(path);
}

Json read_json(const std::filesystem::path& path) { return parse_json(read_config_text(path), path.string()); }

}  // namespace trireme
