// Patterns that texts are split or replaced by: a text, or a regular expression as tokenizer.json has it, which is
// Oniguruma's. PCRE2 runs it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/json.h"

namespace trireme::tokenizers {

struct Match {
  size_t begin;
  size_t end;
  bool is_match;  ///< else the text between two matches
};

class Pattern {
 public:
  /// A regular expression. Throws DataError opening with `place`: a construct that PCRE2 understands otherwise, or not
  /// at all.
  static Pattern regex(std::string_view expression, const std::string& place);
  static Pattern literal(std::string text);
  /// {"Regex": "..."} or {"String": "..."}.
  static Pattern from_json(const Json& json, const std::string& place);

  /// `text` in order, matches and what is between them; the latter is not empty.
  /// Throws    DataError: the text needs more steps than PCRE2 takes.
  std::vector<Match> cut(std::string_view text) const;
  /// `text` with `content` in the place of every match.
  std::string replaced(std::string_view text, std::string_view content) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;  // shared: copies of a compiled expression; null for a literal
  std::string literal_;
};

}  // namespace trireme::tokenizers
