#include "data/tokenizers/bpe.h"

#include <nlohmann/json.hpp>
#include <queue>

#include "data/tokenizers/fields.h"
#include "data/tokenizers/letters.h"
#include "trireme/base/error.h"
#include "trireme/base/utf8.h"

namespace trireme::tokenizers {
namespace {

uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

/// A merge that can be made, unless another one comes before it.
struct Candidate {
  int32_t rank;
  int32_t at;
  int32_t token;
};

// Rules that are equal are applied from the left.
struct IsLater {
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  }
};

std::pair<std::string, std::string> halves_of(const Json& merge, const std::string& place) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  const std::string text = merge.is_string() ? merge.get<std::string>() : "";
  const size_t space = text.find(' ');
  if (space == text.npos || text.find(' ', space + 1) != text.npos)
    throw DataError(trireme::str(place, " is ", excerpt(merge.dump(), 80), "; expected two texts"));
  return {text.substr(0, space), text.substr(space + 1)};
}

}  // namespace

Bpe::Bpe(const Json& json, const std::string& place) {
  Fields fields(json, place);
  // Older files, such as GPT-2's, do not name the kind: that which has merges is this one.
  const bool is_unnamed = fields.find("type") == nullptr && fields.find("merges") != nullptr;
  if (const std::string type = is_unnamed ? "BPE" : fields.text("type"); type != "BPE")
    refuse_type(place, type, {"BPE"});
  fields.refuse("dropout", "tokens would be drawn, which is not done here; set it to null");
  fields.refuse("continuing_subword_prefix", "such prefixes are not known here");
  fields.refuse("end_of_word_suffix", "such suffixes are not known here");
  read_vocabulary(fields.required("vocab"), fields.place_of("vocab"));
  read_merges(fields.list("merges"), fields.place_of("merges"));
  const std::string unknown = fields.text_or("unk_token", "");
  if (!unknown.empty()) {
    const auto found = token(unknown);
    if (!found) fields.fail("unk_token", "the vocabulary lacks it");
    unknown_ = static_cast<int32_t>(*found);
  }
  fuses_unknown_ = fields.flag_or("fuse_unk", false);
  falls_back_on_bytes_ = fields.flag_or("byte_fallback", false);
  takes_whole_words_ = fields.flag_or("ignore_merges", false);
  fields.end();
}

void Bpe::read_vocabulary(const Json& json, const std::string& place) {
  if (!json.is_object()) throw DataError(place + " is no object; expected texts and their tokens");
  vocabulary_.reserve(json.size());
  for (const auto& item : json.items()) {
    const Json& id = item.value();
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= INT32_MAX)
      throw DataError(trireme::str(place, "[", excerpt(item.key(), 40), "] is ", excerpt(id.dump(), 40),
                                   "; expected a whole number of at least 0 that fits 31 bits"));
    vocabulary_.emplace(item.key(), id.get<int32_t>());
  }
}

void Bpe::read_merges(const Json& json, const std::string& place) {
  merges_.reserve(json.size());
  for (size_t rank = 0; rank < json.size(); ++rank) {
    const std::string here = trireme::str(place, "[", rank, "]");
    const auto [left, right] = halves_of(json[rank], here);
    const auto a = token(left), b = token(right), both = token(left + right);
    if (!a || !b || !both)
      throw DataError(trireme::str(here, ": the vocabulary lacks `",
                                   excerpt(!a   ? left
                                           : !b ? right
                                                : left + right,
                                           80),
                                   "`"));
    // A pair that stands twice has its last place, as in the package.
    merges_[pair_of(static_cast<int32_t>(*a), static_cast<int32_t>(*b))] = {static_cast<int32_t>(rank),
                                                                            static_cast<int32_t>(*both)};
  }
}

std::optional<int64_t> Bpe::token(std::string_view text) const {
  const auto found = vocabulary_.find(text);
  return found == vocabulary_.end() ? std::nullopt : std::optional<int64_t>(found->second);
}

const Bpe::Merge* Bpe::merge_of(int32_t left, int32_t right) const {
  const auto found = merges_.find(pair_of(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

std::optional<std::vector<int32_t>> Bpe::bytes_of(std::string_view letter) const {
  constexpr const char* kDigits = "0123456789ABCDEF";
  std::vector<int32_t> tokens;
  for (const char c : letter) {
    const auto byte = static_cast<unsigned char>(c);
    const auto found = token(std::string("<0x") + kDigits[byte >> 4] + kDigits[byte & 15] + ">");
    if (!found) return std::nullopt;
    tokens.push_back(static_cast<int32_t>(*found));
  }
  return tokens;
}

std::vector<int32_t> Bpe::letters(const std::string& word) const {
  std::vector<int32_t> tokens;
  bool follows_unknown = false;
  for (size_t at = 0; at < word.size();) {
    const std::string_view letter = std::string_view(word).substr(at, letter_bytes(std::string_view(word).substr(at)));
    at += letter.size();
    if (const auto known = token(letter)) {
      tokens.push_back(static_cast<int32_t>(*known));
      follows_unknown = false;
      continue;
    }
    if (falls_back_on_bytes_)
      if (const auto bytes = bytes_of(letter)) {
        tokens.insert(tokens.end(), bytes->begin(), bytes->end());
        follows_unknown = false;
        continue;
      }
    if (!unknown_)
      throw DataError(trireme::str("the tokenizer has no token for `", excerpt(letter),
                                   "`, and none for what it does not know; take another tokenizer, or the letter out"));
    if (!(fuses_unknown_ && follows_unknown)) tokens.push_back(*unknown_);
    follows_unknown = true;
  }
  return tokens;
}

void Bpe::merge(std::vector<Symbol>& symbols) const {
  std::priority_queue<Candidate, std::vector<Candidate>, IsLater> candidates;
  const auto offer = [&](int32_t left) {
    const int32_t right = symbols[static_cast<size_t>(left)].next;
    if (right < 0) return;
    const Merge* merge = merge_of(symbols[static_cast<size_t>(left)].token, symbols[static_cast<size_t>(right)].token);
    if (merge != nullptr) candidates.push({merge->rank, left, merge->token});
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) offer(static_cast<int32_t>(i));
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Symbol& left = symbols[static_cast<size_t>(best.at)];
    if (!left.is_there || left.next < 0) continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    const Merge* merge = merge_of(left.token, right.token);
    if (merge == nullptr || merge->token != best.token) continue;  // one of the two has been merged since
    left.token = best.token;
    right.is_there = false;
    left.next = right.next;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].before = best.at;
    if (left.before >= 0) offer(left.before);
    offer(best.at);
  }
}

void Bpe::encode(const std::string& word, std::vector<int64_t>& tokens) const {
  if (word.empty()) return;
  if (takes_whole_words_)
    if (const auto whole = token(word)) {
      tokens.push_back(*whole);
      return;
    }
  const std::vector<int32_t> first = letters(word);
  std::vector<Symbol> symbols;
  symbols.reserve(first.size());
  const auto count = static_cast<int32_t>(first.size());
  for (int32_t i = 0; i < count; ++i)
    symbols.push_back({first[static_cast<size_t>(i)], i - 1, i + 1 < count ? i + 1 : -1, true});
  merge(symbols);
  for (const Symbol& symbol : symbols)
    if (symbol.is_there) tokens.push_back(symbol.token);
}

}  // namespace trireme::tokenizers
