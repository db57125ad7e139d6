#include "trireme/base/name_pattern.h"

#include <algorithm>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"

namespace trireme {
namespace {

constexpr auto kSyntax = std::regex::ECMAScript | std::regex::optimize;

/// Features that make a pattern slow, counted without reading it as a parser would: at least what is there.
struct Form {
  size_t repetitions = 1;      ///< product of the numbers in braces
  size_t unbounded = 0;        ///< * and + and {
  size_t choices = 0;          ///< these, ? and |
  bool repeats_group = false;  ///< one of these behind a parenthesis
};

Form form_of(std::string_view pattern) {
  Form form;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      ++i;
      continue;
    }
    const bool is_unbounded = c == '*' || c == '+' || c == '{';
    form.unbounded += is_unbounded ? 1 : 0;
    form.choices += is_unbounded || c == '?' || c == '|' ? 1 : 0;
    form.repeats_group = form.repeats_group || (is_unbounded && i > 0 && pattern[i - 1] == ')');
    if (c != '{') continue;
    size_t most = 1, number = 0;
    for (size_t k = i + 1; k < pattern.size() && pattern[k] != '}'; ++k) {
      const bool is_digit = pattern[k] >= '0' && pattern[k] <= '9';
      number = is_digit ? std::min<size_t>(number * 10 + static_cast<size_t>(pattern[k] - '0'), 1'000'000) : 0;
      most = std::max(most, number);
    }
    form.repetitions = std::min<size_t>(form.repetitions * most, 1'000'000);
  }
  return form;
}

/// Whether trying one way after the other takes a time that nobody notices.
bool is_simple(const Form& form) { return !form.repeats_group && form.unbounded <= 2 && form.choices <= 12; }

std::regex compiled(const std::string& pattern, const std::string& key, std::regex::flag_type flags) {
  try {
    return std::regex(pattern, flags);
  } catch (const std::regex_error& error) {
    throw ConfigError(str(key, ": '", excerpt(pattern), "' is no regular expression: ", error.what()));
  }
}

const std::string& checked(const std::string& pattern, const std::string& key) {
  if (pattern.size() * form_of(pattern).repetitions > NamePattern::kMostBytes)
    throw ConfigError(str(key, ": '", excerpt(pattern, 60), "' has ", pattern.size(), " characters; at most ",
                          NamePattern::kMostBytes,
                          ", repetitions such as a{50} spelled out, are read: write several patterns"));
  return pattern;
}

std::regex::flag_type with_case(std::regex::flag_type flags, NamePattern::Case letters) {
  return letters == NamePattern::Case::kIgnored ? flags | std::regex::icase : flags;
}

}  // namespace

NamePattern::NamePattern(const std::string& pattern, const std::string& key, Case letters)
    : text_(checked(pattern, key)),
      key_(key),
      is_simple_(is_simple(form_of(pattern))),
      regex_(compiled(pattern, key, with_case(kSyntax, letters))),
      lawful_(is_simple_ ? regex_
                         : compiled(pattern, key, with_case(kSyntax | std::regex_constants::__polynomial, letters))) {}

bool NamePattern::is_in(const std::string& name) const { return std::regex_search(name, lawful_); }

bool NamePattern::begins(const std::string& name) const {
  return std::regex_search(name, lawful_, std::regex_constants::match_continuous);
}

std::optional<size_t> NamePattern::end_in(const std::string& name) const {
  if (!is_simple_ && !is_in(name)) return std::nullopt;
  constexpr size_t kMostSteps = 40'000;  // of calls inside of each other
  if (!is_simple_ && name.size() * text_.size() * form_of(text_).repetitions > kMostSteps)
    throw ConfigError(str(key_, ": '", excerpt(text_, 60), "' is too long a pattern for the name ", excerpt(name, 60),
                          "; write a shorter one"));
  std::smatch match;
  if (!std::regex_search(name, match, regex_)) return std::nullopt;
  return match.position() + match.length();
}

}  // namespace trireme
