#include "data/tokenizers/added_tokens.h"

#include <algorithm>

#include "data/tokenizers/letters.h"

namespace trireme::tokenizers {
namespace {

size_t begin_of_spaces(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    const std::string_view before = text.substr(0, end);
    const size_t bytes = last_letter_bytes(before);
    if (!is_space(before.substr(end - bytes))) break;
    end -= bytes;
  }
  return end;
}

size_t end_of_spaces(std::string_view text, size_t at) {
  while (at < text.size()) {
    const size_t bytes = letter_bytes(text.substr(at));
    if (!is_space(text.substr(at, bytes))) break;
    at += bytes;
  }
  return at;
}

}  // namespace

void AddedTokens::add(const AddedToken& token) {
  if (token.content.empty()) return;
  auto& tokens = by_first_byte_[token.content[0]];
  const auto place = std::ranges::find_if(
      tokens, [&](const AddedToken& other) { return other.content.size() < token.content.size(); });
  tokens.insert(place, token);
}

const AddedToken* AddedTokens::longest_at(std::string_view text) const {
  const auto tokens = by_first_byte_.find(text[0]);
  if (tokens == by_first_byte_.end()) return nullptr;
  const auto found =
      std::ranges::find_if(tokens->second, [&](const AddedToken& token) { return text.starts_with(token.content); });
  return found == tokens->second.end() ? nullptr : &*found;
}

std::vector<Stretch> AddedTokens::cut(std::string_view text) const {
  std::string first_bytes;
  for (const auto& [byte, tokens] : by_first_byte_) first_bytes += byte;
  std::vector<Stretch> stretches;
  size_t done = 0;
  for (size_t at = text.find_first_of(first_bytes); at < text.size(); at = text.find_first_of(first_bytes, at)) {
    const AddedToken* token = longest_at(text.substr(at));
    if (token == nullptr) {
      ++at;
      continue;
    }
    const size_t end = at + token->content.size();
    // Spaces that the token before has taken are gone.
    const size_t begin = std::max(token->takes_spaces_before ? begin_of_spaces(text.substr(0, at)) : at, done);
    const size_t behind = token->takes_spaces_behind ? end_of_spaces(text, end) : end;
    if (done < begin) stretches.push_back({done, begin, std::nullopt});
    stretches.push_back({begin, behind, token->id});
    done = behind;
    at = std::max(end, done);
  }
  if (done < text.size()) stretches.push_back({done, text.size(), std::nullopt});
  return stretches;
}

}  // namespace trireme::tokenizers
