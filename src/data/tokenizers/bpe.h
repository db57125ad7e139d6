// Byte pair encoding: letters of a word are merged, the earliest rule first.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "trireme/base/json.h"

namespace trireme::tokenizers {

struct HashText {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

class Bpe {
 public:
  /// The `model` of tokenizer.json. Throws DataError opening with `place`.
  Bpe(const Json& json, const std::string& place);

  /// Appends the tokens of `word` to `tokens`. Throws DataError: a letter that the vocabulary lacks.
  void encode(const std::string& word, std::vector<int64_t>& tokens) const;

  std::optional<int64_t> token(std::string_view text) const;
  const std::unordered_map<std::string, int32_t, HashText, std::equal_to<>>& vocabulary() const { return vocabulary_; }

 private:
  struct Merge {
    int32_t rank;
    int32_t token;
  };
  struct Symbol {
    int32_t token;
    int32_t before;
    int32_t next;
    bool is_there;
  };
  void read_vocabulary(const Json& json, const std::string& place);
  void read_merges(const Json& json, const std::string& place);
  const Merge* merge_of(int32_t left, int32_t right) const;
  std::vector<int32_t> letters(const std::string& word) const;
  std::optional<std::vector<int32_t>> bytes_of(std::string_view letter) const;
  void merge(std::vector<Symbol>& symbols) const;

  std::unordered_map<std::string, int32_t, HashText, std::equal_to<>> vocabulary_;
  std::unordered_map<uint64_t, Merge> merges_;
  std::optional<int32_t> unknown_;
  bool fuses_unknown_ = false;
  bool falls_back_on_bytes_ = false;
  bool takes_whole_words_ = false;
};

}  // namespace trireme::tokenizers
