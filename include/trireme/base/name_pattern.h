// Regular expressions that users write for names of parameters, modules and classes.
#pragma once

#include <cstddef>
#include <optional>
#include <regex>
#include <string>

namespace trireme {

/// A regular expression (ECMAScript's) that neither its length nor its form lets run out of stack or time, whatever the
/// name: std::regex itself calls a function per character of both, and may try every way to match.
class NamePattern {
 public:
  enum class Case { kMatters, kIgnored };

  /// `key` opens every message, e.g. "trireme.unit_patterns".
  /// Throws    ConfigError: no regular expression; longer than kMostBytes, repetitions spelled out; a back-reference
  ///           beside many repetitions.
  NamePattern(const std::string& pattern, const std::string& key, Case letters = Case::kMatters);

  /// Whether some part of `name` matches.
  bool is_in(const std::string& name) const;
  /// Whether a beginning of `name` matches.
  bool begins(const std::string& name) const;
  /// Where the first match in `name` ends; nullopt: there is none.
  /// Throws    ConfigError: a name and a pattern that are too long for each other.
  std::optional<size_t> end_in(const std::string& name) const;

  /// Repetitions such as a{50} count as 50 times the pattern.
  static constexpr size_t kMostBytes = 5000;

 private:
  const std::string text_;
  const std::string key_;
  const bool is_simple_;
  const std::regex regex_;   ///< tries one way after the other
  const std::regex lawful_;  ///< all ways at once, in time that grows with the name; that of `regex_` if it is simple
};

}  // namespace trireme
