// Tokens that are found in a text as they stand, before anything else looks at it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::tokenizers {

struct AddedToken {
  int64_t id = 0;
  std::string content;
  bool takes_spaces_before = false;  ///< `lstrip`
  bool takes_spaces_behind = false;
};

/// A stretch of a text, or the token that it is.
struct Stretch {
  size_t begin;
  size_t end;
  std::optional<int64_t> token;
};

/// Finds the longest of some tokens at the earliest place, again and again.
class AddedTokens {
 public:
  void add(const AddedToken& token);
  std::vector<Stretch> cut(std::string_view text) const;

 private:
  const AddedToken* longest_at(std::string_view text) const;

  std::map<char, std::vector<AddedToken>> by_first_byte_;  // longest first
};

}  // namespace trireme::tokenizers
