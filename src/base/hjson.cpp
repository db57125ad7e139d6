#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>

#include "base/json_builder.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/utf8.h"

namespace trireme {
namespace {

bool is_blank(char c) { return static_cast<unsigned char>(c) <= ' '; }
bool is_punctuation(char c) { return std::string_view("{}[],:").find(c) != std::string_view::npos; }

std::string_view without_trailing_blanks(std::string_view text) {
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

/// Whether JSON would call it a number: no leading zero or plus sign, digits on both sides of the point.
bool is_number(std::string_view text) {
  size_t at = 0;
  const auto digits = [&] {
    const size_t begin = at;
    while (at < text.size() && std::isdigit(static_cast<unsigned char>(text[at]))) ++at;
    return at - begin;
  };
  const auto skip = [&](std::string_view choices) {
    const bool is_there = at < text.size() && choices.find(text[at]) != std::string_view::npos;
    if (is_there) ++at;
    return is_there;
  };
  skip("-");
  const bool leading_zero = at < text.size() && text[at] == '0';
  const size_t whole = digits();
  if (whole == 0 || (leading_zero && whole > 1)) return false;
  if (skip(".") && digits() == 0) return false;
  if (skip("eE")) {
    skip("+-");
    if (digits() == 0) return false;
  }
  return at == text.size();
}

/// Tells the builder the events of one Hjson text.
class HjsonReader {
 public:
  /// `lines`: filled as key_lines() says.
  HjsonReader(std::string_view text, const std::string& origin, JsonBuilder& builder,
              std::map<std::string, int>* lines = nullptr)
      : text_(text), origin_(origin), builder_(builder), lines_(lines) {}

  void run() {
    skip_blanks();
    if (is_at('{') || is_at('['))
      value();
    else
      object({.has_braces = false});
    skip_blanks();
    if (at_ < text_.size()) fail(at_, "expected the end of the text");
  }

 private:
  struct ObjectForm {
    bool has_braces;
  };

  bool is_at(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool is_at(std::string_view what) const { return text_.substr(at_, what.size()) == what; }
  bool is_at_comment() const { return is_at('#') || is_at("//") || is_at("/*"); }
  bool is_at_line_end() const { return at_ >= text_.size() || is_at('\n') || is_at('\r'); }

  [[noreturn]] void fail(size_t offset, const std::string& reason) const {
    syntax_error(text_, origin_, offset, reason, std::min(at_, without_trailing_blanks(text_).size()));
  }

  [[noreturn]] void fail_without_colon(const std::string& key) const {
    fail(at_, "expected `:` after the key `" + key + "`");
  }

  void skip_blanks() {
    for (;;) {
      if (at_ < text_.size() && is_blank(text_[at_])) {
        ++at_;
      } else if (is_at("/*")) {
        const size_t end = text_.find("*/", at_ + 2);
        if (end == std::string_view::npos) fail(at_, "comment without its end `*/`");
        at_ = end + 2;
      } else if (is_at_comment()) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else {
        return;
      }
    }
  }

  void value() {
    if (is_at('{')) return object({.has_braces = true});
    if (is_at('[')) return list();
    std::string text;
    if (is_at("'''"))
      text = text_of_several_lines();
    else if (is_at('"') || is_at('\''))
      text = text_in_quotes();
    else
      return value_without_quotes();
    builder_.string(text);
  }

  void skip_comma() {
    skip_blanks();
    if (!is_at(',')) return;
    ++at_;
    skip_blanks();
  }

  void object(const ObjectForm& form) {
    const size_t opened = at_;
    builder_.start_object(0);
    if (form.has_braces) ++at_;
    for (skip_blanks(); !(form.has_braces ? is_at('}') : at_ >= text_.size()); skip_comma()) {
      if (at_ >= text_.size()) fail(opened, "this `{` has no `}`");
      const size_t begin = at_;
      std::string name = key();
      builder_.key(name);
      if (lines_ && builder_.path_bytes() <= kMostPathBytes) lines_->emplace(builder_.path(), key_line_.at(begin));
      skip_blanks();
      if (!is_at(':')) fail_without_colon(name);
      ++at_;
      skip_blanks();
      value();
    }
    if (form.has_braces) ++at_;
    builder_.end_object();
  }

  void list() {
    const size_t opened = at_;
    builder_.start_array(0);
    ++at_;
    for (skip_blanks(); !is_at(']'); skip_comma()) {
      if (at_ >= text_.size()) fail(opened, "this `[` has no `]`");
      value();
    }
    ++at_;
    builder_.end_array();
  }

  std::string key() {
    if (is_at('"') || is_at('\'')) return text_in_quotes();
    const size_t begin = at_;
    while (at_ < text_.size() && !is_blank(text_[at_]) && !is_punctuation(text_[at_])) ++at_;
    if (at_ == begin) fail(at_, "expected a key");
    const std::string name = checked(begin, text_.substr(begin, at_ - begin));
    while (at_ < text_.size() && is_blank(text_[at_])) ++at_;
    if (!is_at(':')) fail_without_colon(name);  // a comment cannot stand here, unlike behind a key in quotes
    return name;
  }

  /// A number, true, false or null that a comma, a bracket, a comment or the line's end follows; else a text up to the
  /// line's end.
  void value_without_quotes() {
    const size_t begin = at_;
    if (at_ >= text_.size() || is_punctuation(text_[at_])) fail(at_, "expected a value");
    for (;; ++at_) {
      const bool ends_line = is_at_line_end();
      if (!ends_line && !is_at(',') && !is_at('}') && !is_at(']') && !is_at_comment()) continue;
      const std::string_view token = without_trailing_blanks(text_.substr(begin, at_ - begin));
      // Longer ones are texts: each comma of a line would look through all that is in front of it.
      constexpr size_t kMostLiteralBytes = 1000;
      if (token.size() <= kMostLiteralBytes && literal(token)) return;
      if (!ends_line) continue;
      std::string text = checked(begin, token);
      builder_.string(text);
      return;
    }
  }

  bool literal(std::string_view token) {
    if (token == "null") return builder_.null();
    if (token == "true" || token == "false") return builder_.boolean(token == "true");
    if (token == "Infinity" || token == "-Infinity") return builder_.number_float(infinity(token), "");
    if (!is_number(token)) return false;
    if (std::isinf(std::strtod(std::string(token).c_str(), nullptr))) return builder_.number_float(infinity(token), "");
    const Json number = Json::parse(token);
    if (number.is_number_unsigned()) return builder_.number_unsigned(number.get<uint64_t>());
    if (number.is_number_integer()) return builder_.number_integer(number.get<int64_t>());
    return builder_.number_float(number.get<double>(), "");
  }

  static double infinity(std::string_view token) {
    constexpr double infinite = std::numeric_limits<double>::infinity();
    return token.front() == '-' ? -infinite : infinite;
  }

  /// As JSON's texts, in either kind of quotes.
  std::string text_in_quotes() {
    const size_t begin = at_;
    const char quote = text_[at_++];
    std::string json = "\"";
    for (; !is_at(quote); ++at_) {
      if (is_at_line_end()) fail(begin, str("this text has no end ", quote));
      const char c = text_[at_];
      if (c == '\\' && at_ + 1 < text_.size()) {
        const char escaped = text_[++at_];
        json += escaped == '\'' ? "'" : std::string{'\\', escaped};
      } else {
        json += c == '"' ? "\\\"" : std::string(1, c);
      }
    }
    ++at_;
    const Json parsed = Json::parse(json + '"', nullptr, false);
    if (parsed.is_discarded()) fail(begin, "this text has an escape or a byte that JSON does not have");
    return parsed.get<std::string>();
  }

  /// Between ''' and ''': line by line, without the indentation of the opening quotes.
  std::string text_of_several_lines() {
    const size_t begin = at_;
    const size_t indentation = place_of(text_, begin).column - 1;
    const auto skip_indentation = [&] {
      for (size_t n = 0; n < indentation && at_ < text_.size() && is_blank(text_[at_]) && !is_at('\n'); ++n) ++at_;
    };
    at_ += 3;
    while (at_ < text_.size() && is_blank(text_[at_]) && !is_at('\n')) ++at_;
    if (is_at('\n')) {
      ++at_;
      skip_indentation();
    }
    std::string text;
    while (!is_at("'''")) {
      if (at_ >= text_.size()) fail(begin, "this text has no end '''");
      const char c = text_[at_++];
      if (c != '\r') text += c;
      if (c == '\n') skip_indentation();
    }
    at_ += 3;
    if (text.ends_with('\n')) text.pop_back();
    return checked(begin, text);
  }

  std::string checked(size_t begin, std::string_view text) const {
    if (!is_utf8(text)) fail(begin, "not UTF-8; save the file as UTF-8");
    return std::string(text);
  }

  const std::string_view text_;
  const std::string& origin_;
  JsonBuilder& builder_;
  std::map<std::string, int>* const lines_;
  size_t at_ = 0;
  LineCount key_line_{text_};
};

}  // namespace

Json parse_hjson(std::string_view text, const std::string& origin) {
  try {
    return parse_json(text, origin);
  } catch (const SyntaxError& of_json) {
    if (without_trailing_blanks(text).empty())
      throw SyntaxError(origin + ": empty, where an object { … } is expected", 1);
    try {
      JsonBuilder builder(text, origin);
      HjsonReader(text, origin, builder).run();
      return builder.take();
    } catch (const SyntaxError& of_hjson) {
      // A file that was meant as JSON fails as JSON where its mistake is; one that was meant as Hjson fails there long
      // before.
      if (of_hjson.line() > of_json.line()) throw;
    }
    throw;
  }
}

Json read_hjson(const std::filesystem::path& path) { return parse_hjson(read_config_text(path), path.string()); }

std::map<std::string, int> key_lines(std::string_view text) {
  std::map<std::string, int> lines;
  const std::string origin;
  JsonBuilder builder(text, origin);
  try {
    HjsonReader(text, origin, builder, &lines).run();
  } catch (const ConfigError&) {
    lines.clear();
  }
  return lines;
}

}  // namespace trireme
