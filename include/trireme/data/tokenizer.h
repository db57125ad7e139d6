// Tokenizers as Hugging Face's tokenizer.json describes them: byte-level BPE (GPT-2, Llama 3, Qwen) and BPE of letters
// with bytes to fall back on (Llama 2).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

/// Tokens that the post-processor of a tokenizer puts around a text, such as <s>.
enum class TemplateTokens { kLeftOut, kAdded };

/// Tokens that the file calls special, in a text that is written.
enum class SpecialTokens { kLeftOut, kWritten };

/// A tokenizer. Functions may be called from any thread; one encodes at a time.
class Tokenizer {
 public:
  class Parts;
  explicit Tokenizer(std::unique_ptr<const Parts> parts);
  ~Tokenizer();

  /// The largest token + 1, added tokens included.
  int64_t vocab_size() const;

  /// The tokens of `text`, as Hugging Face's tokenizers has them. Added tokens that stand in the text are found there.
  ///
  /// Cost      linear; words are remembered.
  /// Throws    DataError: not UTF-8, a letter that the vocabulary lacks.
  std::vector<int64_t> encode(std::string_view text, TemplateTokens around = TemplateTokens::kAdded) const;

  /// The tokens of a document to train on: encode(), and the token that ends a document unless it is the last already.
  /// Throws as encode(), and StateError without such a token.
  std::vector<int64_t> encode_document(std::string_view text) const;

  /// The tokens of a document's beginning: those of encode_document() that a longer text begins with. The end of the
  /// document before stands first where the template has no token for a beginning. Throws likewise.
  std::vector<int64_t> encode_prompt(std::string_view text) const;

  /// The text of `tokens`. Those that no token has are left out. Where the tokenizer is byte-level, tokens that end
  /// within a letter give bytes that are no UTF-8.
  std::string decode(const std::vector<int64_t>& tokens, SpecialTokens special = SpecialTokens::kLeftOut) const;

  /// The token that ends a document; nothing where neither file nor flag says it.
  std::optional<int64_t> document_end() const;
  /// The token of that text.
  std::optional<int64_t> token(std::string_view text) const;

  /// A hash of the file and the token that ends a document.
  uint64_t fingerprint() const;

 private:
  std::unique_ptr<const Parts> parts_;
};

struct TokenizerOptions {
  /// Text of the token that ends a document; empty: the `eos_token` of the tokenizer_config.json beside the file.
  std::string eos_token = {};
};

/// Reads a tokenizer.json, or the one in a folder.
///
/// Cost      some seconds per million merges.
/// Throws    DataError naming the file, the place in it and what is there: whatever this library does not know, before
///           anything is encoded; an eos_token that is no token. IoError: it cannot be read.
std::shared_ptr<const Tokenizer> load_tokenizer(const std::filesystem::path& file_or_folder,
                                                const TokenizerOptions& options = {});

}  // namespace trireme
