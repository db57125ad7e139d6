#include "data/tokenizers/pre_tokenizer.h"

#include <optional>
#include <string_view>

#include "data/tokenizers/fields.h"
#include "data/tokenizers/letters.h"
#include "data/tokenizers/pattern.h"
#include "trireme/base/error.h"

namespace trireme::tokenizers {
namespace {

/// The use of the text that a pattern matches.
enum class Behavior { kRemoved, kIsolated, kWithPrevious, kWithNext, kContiguous };

Behavior behavior_of(Fields& fields) {
  const std::string name = fields.text("behavior");
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "MergedWithPrevious") return Behavior::kWithPrevious;
  if (name == "MergedWithNext") return Behavior::kWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  fields.fail("behavior", "known are Removed, Isolated, MergedWithPrevious, MergedWithNext and Contiguous");
}

class Cutter {
 public:
  Cutter(Pattern pattern, Behavior behavior, bool inverts)
      : pattern_(std::move(pattern)), behavior_(behavior), inverts_(inverts) {}

  void cut(Piece piece, std::vector<Piece>& pieces) const {
    std::vector<Match> parts = pattern_.cut(piece.text);
    if (inverts_)
      for (Match& part : parts) part.is_match = !part.is_match;
    if (parts.size() == 1 && !(parts[0].is_match && behavior_ == Behavior::kRemoved)) {
      if (!piece.text.empty()) pieces.push_back(std::move(piece));
      return;
    }
    for (const Match& part : joined_parts(std::move(parts)))
      if (part.begin < part.end)
        pieces.push_back({piece.text.substr(part.begin, part.end - part.begin), piece.begins_text && part.begin == 0});
  }

 private:
  std::vector<Match> joined_parts(std::vector<Match> parts) const {
    std::vector<Match> result;
    if (behavior_ == Behavior::kWithNext) {
      // A match goes before what follows it, unless that is a match again.
      for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
        if (part->is_match && !result.empty() && !result.back().is_match) {
          result.back() = {part->begin, result.back().end, true};
        } else {
          result.push_back(*part);
        }
      }
      return {result.rbegin(), result.rend()};
    }
    bool follows_match = false;
    for (const Match& part : parts) {
      const bool joins = (behavior_ == Behavior::kWithPrevious && part.is_match && !follows_match) ||
                         (behavior_ == Behavior::kContiguous && part.is_match == follows_match);
      if (behavior_ == Behavior::kRemoved && part.is_match) continue;
      if (joins && !result.empty()) {
        result.back().end = part.end;
      } else {
        result.push_back(part);
      }
      follows_match = part.is_match;
    }
    return result;
  }

  Pattern pattern_;
  Behavior behavior_;
  bool inverts_;
};

std::vector<Piece> cut_all(const Cutter& cutter, std::vector<Piece> pieces) {
  std::vector<Piece> result;
  for (Piece& piece : pieces) cutter.cut(std::move(piece), result);
  return result;
}

class Split final : public PreTokenizer {
 public:
  explicit Split(Cutter cutter) : cutter_(std::move(cutter)) {}
  std::vector<Piece> apply(std::vector<Piece> pieces) const override { return cut_all(cutter_, std::move(pieces)); }

 private:
  Cutter cutter_;
};

class ByteLevel final : public PreTokenizer {
 public:
  ByteLevel(bool adds_space, bool cuts) : adds_space_(adds_space) {
    // GPT-2's words: contractions, letters, digits, others, each with the space before it; spaces.
    constexpr const char* kWords = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    if (cuts) cutter_.emplace(Pattern::regex(kWords, "ByteLevel"), Behavior::kIsolated, false);
  }

  std::vector<Piece> apply(std::vector<Piece> pieces) const override {
    if (adds_space_)
      for (Piece& piece : pieces)
        if (!piece.text.starts_with(' ')) piece.text.insert(0, " ");
    if (cutter_) pieces = cut_all(*cutter_, std::move(pieces));
    for (Piece& piece : pieces) piece.text = letters_of_bytes(piece.text);
    return pieces;
  }

 private:
  bool adds_space_;
  std::optional<Cutter> cutter_;
};

class Metaspace final : public PreTokenizer {
 public:
  Metaspace(std::string replacement, PrependScheme scheme, bool cuts)
      : replacement_(std::move(replacement)), scheme_(scheme), space_(Pattern::literal(" ")) {
    if (cuts) cutter_.emplace(Pattern::literal(replacement_), Behavior::kWithNext, false);
  }

  std::vector<Piece> apply(std::vector<Piece> pieces) const override {
    for (Piece& piece : pieces) {
      piece.text = space_.replaced(piece.text, replacement_);
      const bool prepends =
          scheme_ == PrependScheme::kAlways || (scheme_ == PrependScheme::kFirst && piece.begins_text);
      if (prepends && !piece.text.starts_with(replacement_)) piece.text.insert(0, replacement_);
    }
    return cutter_ ? cut_all(*cutter_, std::move(pieces)) : pieces;
  }

 private:
  std::string replacement_;
  PrependScheme scheme_;
  Pattern space_;
  std::optional<Cutter> cutter_;
};

class PreTokenizerSequence final : public PreTokenizer {
 public:
  explicit PreTokenizerSequence(std::vector<std::unique_ptr<const PreTokenizer>> parts) : parts_(std::move(parts)) {}
  std::vector<Piece> apply(std::vector<Piece> pieces) const override {
    for (const auto& part : parts_) pieces = part->apply(std::move(pieces));
    return pieces;
  }

 private:
  std::vector<std::unique_ptr<const PreTokenizer>> parts_;
};

std::unique_ptr<const PreTokenizer> pre_tokenizer_sequence(const Json& list, const std::string& place) {
  std::vector<std::unique_ptr<const PreTokenizer>> parts;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string part = trireme::str(place, "[", i, "]");
    (void)type_of(list[i], part);  // null is none of a sequence
    parts.push_back(make_pre_tokenizer(list[i], part));
  }
  return std::make_unique<PreTokenizerSequence>(std::move(parts));
}

Pattern pattern_of(Fields& fields) {
  return Pattern::from_json(fields.required("pattern"), fields.place_of("pattern"));
}

}  // namespace

PrependScheme prepend_scheme(Fields& fields) {
  const bool adds_space = fields.flag_or("add_prefix_space", true);
  const std::string name = fields.text_or("prepend_scheme", adds_space ? "always" : "never");
  if (name == "always") return PrependScheme::kAlways;
  if (name == "first") return PrependScheme::kFirst;
  if (name != "never") fields.fail("prepend_scheme", "known are always, first and never");
  return PrependScheme::kNever;
}

std::unique_ptr<const PreTokenizer> make_pre_tokenizer(const Json& json, const std::string& place) {
  if (json.is_null()) return nullptr;
  const std::string type = type_of(json, place);
  Fields fields(json, place);
  fields.pass_over({"type"});
  std::unique_ptr<const PreTokenizer> made;
  if (type == "ByteLevel") {
    fields.pass_over({"trim_offsets"});
    made = std::make_unique<ByteLevel>(fields.flag_or("add_prefix_space", true), fields.flag_or("use_regex", true));
  } else if (type == "Split") {
    const Behavior behavior = behavior_of(fields);
    made = std::make_unique<Split>(Cutter(pattern_of(fields), behavior, fields.flag_or("invert", false)));
  } else if (type == "Digits") {
    const bool each = fields.flag_or("individual_digits", false);
    made = std::make_unique<Split>(
        Cutter(Pattern::regex(R"(\p{N})", place), each ? Behavior::kIsolated : Behavior::kContiguous, false));
  } else if (type == "Metaspace") {
    fields.pass_over({"str_rep"});
    const PrependScheme scheme = prepend_scheme(fields);
    made = std::make_unique<Metaspace>(fields.text("replacement"), scheme, fields.flag_or("split", true));
  } else if (type == "Sequence") {
    made = pre_tokenizer_sequence(fields.list("pretokenizers"), fields.place_of("pretokenizers"));
  } else {
    refuse_type(place, type, {"ByteLevel", "Digits", "Metaspace", "Sequence", "Split"});
  }
  fields.end();
  return made;
}

}  // namespace trireme::tokenizers
