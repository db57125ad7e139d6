// Token data sets for language models: files seen as one stream of tokens, cut into samples of equal length.
//
// A stream is the files in the order of their relative paths. Byte-level documents are each followed by one separator
// (token 0, which text does not contain); token files are joined as they are, since a tokenizer has put its own
// end-of-document tokens in. Sample i reads the S + 1 tokens from i * S on: S inputs, and the same shifted by one as
// targets.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

/// How tokens are stored.
enum class DataFormat {
  kAuto,    ///< by name: .npy by its header, .bin is uint16, of .jsonl and .parquet texts, everything else bytes
  kBytes,   ///< one token per byte, vocabulary 256
  kUint16,  ///< raw little-endian tokens, or .npy of this type
  kUint32,
};

/// The format called `name` (auto, bytes, uint16, uint32). Throws ConfigError with the names that exist.
DataFormat data_format(const std::string& name);

/// The byte-level vocabulary and the token that ends each byte-level document.
inline constexpr int64_t kByteVocabSize = 256;
inline constexpr int64_t kDocumentEnd = 0;

class Tokenizer;

/// Options of open_data().
struct DataOptions {
  /// A file; a folder (all its files, recursively; hidden ones and, for bytes, those with a NUL byte in the first 8 KiB
  /// are skipped); or a glob (*, ?, [...] within a name, ** over folders).
  std::string path = {};
  DataFormat format = DataFormat::kAuto;
  int64_t seq = 256;  ///< tokens per sample
  /// Part of the files (by a hash of relative path and seed) that training never sees; of a single file, its tail.
  double held_out_fraction = 0.05;
  uint64_t seed = 0;                      ///< of the split, not of the order
  int64_t vocab_size = 0;                 ///< of the model; tokens are checked against it; 0: not checked
  std::vector<std::string> exclude = {};  ///< names of files or folders to leave out, with * ? [...], e.g. "test*"
  /// The key of JSON files, or the column of Parquet, whose texts are the documents; empty: `text`.
  std::string text_key = {};
  /// The Python whose pyarrow reads Parquet; empty: TRIREME_PYTHON. Without pyarrow there: `python3` of PATH.
  std::string python = {};
  /// The tokenizer of texts: documents become its tokens, each with the token that ends a document. Null: bytes.
  std::shared_ptr<const Tokenizer> tokenizer = {};  // shared: with whoever writes the texts that a model makes
};

/// Tensors of one or more samples: int64, on the host, owning their memory.
struct TokenBatch {
  at::Tensor input;
  at::Tensor target;
};

class TokenStream;

/// Samples of one split. A value: copies share the mapped files.
///
/// Files are mapped, not read; those under 4 KiB, any beyond 16,384 maps, the texts of JSON, Parquet and compressed
/// files, and the tokens of a tokenizer (four bytes each) are on the heap. A mapped file must not be truncated while in
/// use (the kernel raises SIGBUS).
class TokenDataset {
 public:
  TokenDataset() = default;  ///< empty: size() is 0
  TokenDataset(std::shared_ptr<const TokenStream> stream, int64_t seq);

  int64_t size() const;  ///< samples
  int64_t seq() const { return seq_; }
  int64_t tokens() const;
  int64_t files() const;
  /// A hash of relative paths, sizes and seq: two data sets with the same fingerprint have the same samples, unless a
  /// file was rewritten in place.
  int64_t fingerprint() const;

  /// Shapes    -> input [S], target [S].
  /// Throws    ShapeError: index outside [0, size()).
  TokenBatch sample(int64_t index) const;

  /// Samples `indices`, stacked. Shapes  -> input [B, S], target [B, S]. Throws as sample().
  TokenBatch batch(const std::vector<int64_t>& indices) const;

 private:
  std::shared_ptr<const TokenStream> stream_;  // shared: both splits of one file read the same map
  int64_t seq_ = 0;
};

/// The result of open_data().
struct DataSplits {
  TokenDataset train;
  TokenDataset held_out;  ///< empty when held_out_fraction is 0
  /// Least one for a model: 256 for bytes, the tokenizer's, else as given (0: unknown).
  int64_t vocab_size = 0;
  DataFormat format = DataFormat::kBytes;  ///< of the files, never kAuto; of .npy files of several types, the first's
  int64_t skipped_files = 0;  ///< empty ones; for bytes binary ones too, for tokens what is neither .bin nor .npy
  std::vector<std::string> skipped_kinds = {};  ///< of binary ones, such as "gzip", each once
  int64_t json_files = 0;                       ///< of which the texts of a key were taken
  int64_t parquet_files = 0;                    ///< of which the texts of a column were taken
  bool is_encoded = false;                      ///< by a tokenizer, from text
};

/// Opens, checks and splits a data set.
///
/// Cost      token files are read once when vocab_size is given; bytes are not. A tokenizer encodes every text.
/// Throws    DataError, naming path, value and fix: missing, unreadable, empty, damaged .npy, not a whole number of
///           tokens, a token >= vocab_size, a split shorter than one sample, a record of JSON without the text key (by
///           its line, with the keys that it has), Parquet that is damaged, or without the column, or where no Python
///           has pyarrow, a binary format (by its name), what is compressed and damaged (by the offset), text that is
///           not UTF-8 beside a tokenizer. ConfigError: an option out of range.
DataSplits open_data(const DataOptions& options);

}  // namespace trireme
