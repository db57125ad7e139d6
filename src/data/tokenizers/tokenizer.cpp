#include "trireme/data/tokenizer.h"

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "data/hash.h"
#include "data/tokenizers/added_tokens.h"
#include "data/tokenizers/bpe.h"
#include "data/tokenizers/decoder.h"
#include "data/tokenizers/fields.h"
#include "data/tokenizers/letters.h"
#include "data/tokenizers/normalizer.h"
#include "data/tokenizers/pre_tokenizer.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/utf8.h"
#include "trireme/base/words.h"

namespace trireme {

using tokenizers::Fields;
using tokenizers::Piece;

class Tokenizer::Parts {
 public:
  Parts(const std::string& file, const std::string& path);

  void set_document_end(int64_t token) {
    document_end = token;
    fingerprint = hash_text("document end", fingerprint ^ static_cast<uint64_t>(token + 1));
  }
  std::optional<int64_t> token(std::string_view text) const;
  void encode(std::string_view text, std::vector<int64_t>& tokens) const;

  int64_t vocab_size = 0;
  std::optional<int64_t> document_end;
  uint64_t fingerprint;
  std::vector<int64_t> before;  // a text, by the post-processor
  std::vector<int64_t> behind;
  std::vector<std::string> texts;  // of tokens; empty for those that are none
  std::set<int64_t> special;
  std::unique_ptr<const tokenizers::Decoder> decoder;

 private:
  void read_added(const Json& list, const std::string& place);
  void read_post_processor(const Json& json, const std::string& place);
  void read_template(Fields& fields);
  void set_text(int64_t token, const std::string& text, const std::string& place);
  void encode_words(const std::string& text, bool begins_text, std::vector<int64_t>& tokens) const;
  void encode_word(const std::string& word, std::vector<int64_t>& tokens) const;

  std::unique_ptr<const tokenizers::Bpe> model_;
  std::unique_ptr<const tokenizers::Normalizer> normalizer_;
  std::unique_ptr<const tokenizers::PreTokenizer> pre_tokenizer_;
  tokenizers::AddedTokens added_;             // found in the text as it is given
  tokenizers::AddedTokens added_normalized_;  // found in the normalized text
  std::map<std::string, int64_t, std::less<>> added_ids_;
  mutable std::mutex mutex_;
  mutable std::unordered_map<std::string, std::vector<int64_t>> words_;
};

Tokenizer::Parts::Parts(const std::string& file, const std::string& path) : fingerprint(hash_text(file, 0)) {
  const Json json = parse_plain_json(file);
  if (json.is_discarded()) throw DataError(path + ": this is no JSON; give a tokenizer.json of Hugging Face's form");
  Fields fields(json, path + ": ");
  fields.pass_over({"version", "truncation", "padding"});  // of batches; nothing is shortened or filled here
  const auto value = [&](const char* key) -> const Json& {
    static const Json kNothing;
    const Json* found = fields.find(key);
    return found == nullptr ? kNothing : *found;
  };
  model_ = std::make_unique<tokenizers::Bpe>(fields.required("model"), fields.place_of("model"));
  normalizer_ = tokenizers::make_normalizer(value("normalizer"), fields.place_of("normalizer"));
  pre_tokenizer_ = tokenizers::make_pre_tokenizer(value("pre_tokenizer"), fields.place_of("pre_tokenizer"));
  decoder = tokenizers::make_decoder(value("decoder"), fields.place_of("decoder"));
  const std::string place = fields.place_of("model.vocab");
  for (const auto& [text, token] : model_->vocabulary()) set_text(token, text, place);
  if (fields.find("added_tokens") != nullptr) read_added(fields.list("added_tokens"), fields.place_of("added_tokens"));
  if (const Json* post = fields.find("post_processor")) read_post_processor(*post, fields.place_of("post_processor"));
  fields.end();
  vocab_size = static_cast<int64_t>(texts.size());
}

void Tokenizer::Parts::set_text(int64_t token, const std::string& text, const std::string& place) {
  constexpr int64_t kMost = 1 << 24;  // each is a row of the model's weights
  if (token >= kMost)
    throw DataError(str(place, ": `", excerpt(text, 40), "` has the number ", token, "; expected one below ", kMost));
  if (token >= static_cast<int64_t>(texts.size())) texts.resize(static_cast<size_t>(token) + 1);
  texts[static_cast<size_t>(token)] = text;
}

// The package numbers tokens that the vocabulary lacks by itself, whatever the file says. A file that says something
// else has two meanings, and is refused.
void Tokenizer::Parts::read_added(const Json& list, const std::string& place) {
  auto next = static_cast<int64_t>(model_->vocabulary().size());
  for (size_t i = 0; i < list.size(); ++i) {
    Fields fields(list[i], str(place, "[", i, "]"));
    tokenizers::AddedToken token{.id = fields.integer("id"), .content = fields.text("content")};
    fields.refuse("single_word", "a token that must be a word of its own is not known here");
    token.takes_spaces_before = fields.flag_or("lstrip", false);
    token.takes_spaces_behind = fields.flag_or("rstrip", false);
    const bool is_special = fields.flag_or("special", false);
    const bool is_normalized = fields.flag_or("normalized", !is_special);
    fields.end();
    if (token.content.empty()) continue;  // as there
    const auto known = this->token(token.content);
    if (known && *known != token.id) fields.fail("id", str("the vocabulary has ", *known, " for this token"));
    if (!known && token.id != next)
      fields.fail("id", str("the package tokenizers takes ", next, " for this token, as the next behind the others; ",
                            "save the file anew by the package"));
    next = std::max(next, token.id + 1);
    added_ids_[token.content] = token.id;
    if (is_special) special.insert(token.id);
    if (is_normalized && normalizer_) token.content = normalizer_->apply(token.content);
    set_text(token.id, token.content, fields.place());
    (is_normalized ? added_normalized_ : added_).add(token);
  }
}

void Tokenizer::Parts::read_post_processor(const Json& json, const std::string& place) {
  const std::string type = tokenizers::type_of(json, place);
  Fields fields(json, place);
  fields.pass_over({"type"});
  if (type == "ByteLevel") {
    fields.pass_over({"add_prefix_space", "trim_offsets", "use_regex"});  // they change offsets alone
  } else if (type == "TemplateProcessing") {
    read_template(fields);
  } else if (type == "Sequence") {
    const Json& list = fields.list("processors");
    for (size_t i = 0; i < list.size(); ++i)
      read_post_processor(list[i], str(fields.place_of("processors"), "[", i, "]"));
  } else {
    tokenizers::refuse_type(place, type, {"ByteLevel", "Sequence", "TemplateProcessing"});
  }
  fields.end();
}

void Tokenizer::Parts::read_template(Fields& fields) {
  fields.pass_over({"pair"});
  Fields tokens(fields.required("special_tokens"), fields.place_of("special_tokens"));
  const Json& parts = fields.list("single");
  std::vector<int64_t> first, last;
  bool has_text = false;
  for (size_t i = 0; i < parts.size(); ++i) {
    Fields part(parts[i], str(fields.place_of("single"), "[", i, "]"));
    if (const Json* sequence = part.find("Sequence")) {
      if (has_text || Fields(*sequence, part.place_of("Sequence")).text("id") != "A")
        part.fail("Sequence", "expected one `A` in all");
      has_text = true;
      continue;
    }
    const std::string name = Fields(part.required("SpecialToken"), part.place_of("SpecialToken")).text("id");
    Fields token(tokens.required(name), tokens.place_of(name));
    for (const Json& id : token.list("ids")) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= static_cast<int64_t>(texts.size()))
        token.fail("ids", "expected tokens of this tokenizer");
      (has_text ? last : first).push_back(id.get<int64_t>());
    }
  }
  if (!has_text) fields.fail("single", "it has no place for the text");
  before.insert(before.begin(), first.begin(), first.end());
  behind.insert(behind.end(), last.begin(), last.end());
}

std::optional<int64_t> Tokenizer::Parts::token(std::string_view text) const {
  const auto found = added_ids_.find(text);
  return found == added_ids_.end() ? model_->token(text) : std::optional<int64_t>(found->second);
}

void Tokenizer::Parts::encode(std::string_view text, std::vector<int64_t>& tokens) const {
  if (!is_utf8(text)) throw DataError(str("a text of ", text.size(), " bytes is not UTF-8, which a tokenizer reads"));
  const std::lock_guard lock(mutex_);
  for (const auto& outer : added_.cut(text)) {
    if (outer.token) {
      tokens.push_back(*outer.token);
      continue;
    }
    std::string normalized(text.substr(outer.begin, outer.end - outer.begin));
    if (normalizer_) normalized = normalizer_->apply(std::move(normalized));
    for (const auto& inner : added_normalized_.cut(normalized)) {
      if (inner.token) {
        tokens.push_back(*inner.token);
      } else {
        encode_words(normalized.substr(inner.begin, inner.end - inner.begin), outer.begin == 0 && inner.begin == 0,
                     tokens);
      }
    }
  }
}

void Tokenizer::Parts::encode_words(const std::string& text, bool begins_text, std::vector<int64_t>& tokens) const {
  std::vector<Piece> words = {{text, begins_text}};
  if (pre_tokenizer_) words = pre_tokenizer_->apply(std::move(words));
  for (const Piece& word : words) encode_word(word.text, tokens);
}

void Tokenizer::Parts::encode_word(const std::string& word, std::vector<int64_t>& tokens) const {
  constexpr size_t kLongest = 64, kMostWords = 1 << 17;
  if (word.size() > kLongest) return model_->encode(word, tokens);
  auto found = words_.find(word);
  if (found == words_.end()) {
    if (words_.size() >= kMostWords) words_.clear();
    std::vector<int64_t> made;
    model_->encode(word, made);
    found = words_.emplace(word, std::move(made)).first;
  }
  tokens.insert(tokens.end(), found->second.begin(), found->second.end());
}

Tokenizer::Tokenizer(std::unique_ptr<const Parts> parts) : parts_(std::move(parts)) {}
Tokenizer::~Tokenizer() = default;

int64_t Tokenizer::vocab_size() const { return parts_->vocab_size; }
std::optional<int64_t> Tokenizer::document_end() const { return parts_->document_end; }
std::optional<int64_t> Tokenizer::token(std::string_view text) const { return parts_->token(text); }
uint64_t Tokenizer::fingerprint() const { return parts_->fingerprint; }

std::vector<int64_t> Tokenizer::encode(std::string_view text, TemplateTokens around) const {
  const bool has_template = around == TemplateTokens::kAdded;
  std::vector<int64_t> tokens;
  if (has_template) tokens = parts_->before;
  parts_->encode(text, tokens);
  if (has_template) tokens.insert(tokens.end(), parts_->behind.begin(), parts_->behind.end());
  return tokens;
}

std::vector<int64_t> Tokenizer::encode_document(std::string_view text) const {
  if (!parts_->document_end) throw StateError("the tokenizer does not say which token ends a document");
  std::vector<int64_t> tokens = encode(text);
  if (tokens.empty() || tokens.back() != *parts_->document_end) tokens.push_back(*parts_->document_end);
  return tokens;
}

std::vector<int64_t> Tokenizer::encode_prompt(std::string_view text) const {
  if (!parts_->document_end) throw StateError("the tokenizer does not say which token ends a document");
  std::vector<int64_t> tokens = parts_->before.empty() ? std::vector{*parts_->document_end} : parts_->before;
  parts_->encode(text, tokens);
  return tokens;
}

std::string Tokenizer::decode(const std::vector<int64_t>& tokens, SpecialTokens special) const {
  std::vector<std::string> texts;
  for (const int64_t token : tokens) {
    const bool is_known =
        token >= 0 && token < parts_->vocab_size && !parts_->texts[static_cast<size_t>(token)].empty();
    if (is_known && (special == SpecialTokens::kWritten || !parts_->special.contains(token)))
      texts.push_back(parts_->texts[static_cast<size_t>(token)]);
  }
  return parts_->decoder ? joined(parts_->decoder->apply(std::move(texts)), "") : joined(texts, " ");
}

namespace {

namespace fs = std::filesystem;

// The text of `eos_token` in the tokenizer_config.json beside the file; empty where there is none.
std::string eos_beside(const fs::path& file) {
  const fs::path config = file.parent_path() / "tokenizer_config.json";
  std::error_code unreadable;
  if (!fs::exists(config, unreadable)) return "";
  const Json json = parse_plain_json(posix_file_system().read(config));
  if (!json.is_object()) throw DataError(config.string() + ": this is no JSON object; mend it, or take it away");
  const Json token = json.value("eos_token", Json());
  const Json text = token.is_object() ? token.value("content", Json()) : token;
  return text.is_string() ? text.get<std::string>() : "";
}

}  // namespace

std::shared_ptr<const Tokenizer> load_tokenizer(const fs::path& file_or_folder, const TokenizerOptions& options) {
  std::error_code unreadable;
  const fs::path file =
      fs::is_directory(file_or_folder, unreadable) ? file_or_folder / "tokenizer.json" : file_or_folder;
  auto parts = std::make_unique<Tokenizer::Parts>(posix_file_system().read(file), file.string());
  const std::string eos = options.eos_token.empty() ? eos_beside(file) : options.eos_token;
  if (!eos.empty()) {
    const auto token = parts->token(eos);
    if (!token)
      throw DataError(str(file.string(), ": it has no token `", excerpt(eos, 80), "`, which is to end documents",
                          options.eos_token.empty() ? " by the tokenizer_config.json beside it" : "",
                          "; name one of its tokens (--eos-token)"));
    parts->set_document_end(*token);
  }
  return std::make_shared<const Tokenizer>(std::move(parts));
}

}  // namespace trireme
