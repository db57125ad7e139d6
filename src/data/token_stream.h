// Tokens of many files as one sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "trireme/base/file.h"
#include "trireme/data/dataset.h"

namespace trireme {

/// A run of tokens within one file.
struct TokenPiece {
  std::shared_ptr<const MappedFile> file;  // shared: both splits of one file read the same map
  std::string path;
  std::string relative;
  const std::byte* data = nullptr;
  DataFormat format = DataFormat::kBytes;  ///< never kAuto
  int64_t stored = 0;                      ///< tokens in the file
  int64_t skipped = 0;                     ///< tokens of the file that stand before `data`
  bool ends_document = false;              ///< a separator follows the stored tokens

  int64_t tokens() const { return stored + (ends_document ? 1 : 0); }
};

class TokenStream {
 public:
  explicit TokenStream(std::vector<TokenPiece> pieces);

  int64_t tokens() const { return begins_.back(); }
  const std::vector<TokenPiece>& pieces() const { return pieces_; }
  uint64_t fingerprint() const;

  /// Writes tokens [begin, begin + count) to `out`.
  /// Cost      a binary search over the files, then one pass.
  void copy(int64_t begin, int64_t count, int64_t* out) const;

 private:
  std::vector<TokenPiece> pieces_;
  std::vector<int64_t> begins_;  // of each piece in the stream; one more entry: the end
};

/// Bytes per stored token.
size_t itemsize(DataFormat format);

/// Throws DataError when a token of `piece` is not below `vocab_size`. Reads the whole piece.
void check_vocabulary(const TokenPiece& piece, int64_t vocab_size);

}  // namespace trireme
