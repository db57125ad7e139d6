#include "data/token_stream.h"

#include <algorithm>
#include <cstring>

#include "data/hash.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

/// The data of a .npy file may stand at any offset, so tokens are read through memcpy (which costs nothing).
template <class Stored>
Stored load(const std::byte* data, int64_t index) {
  Stored value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(Stored)), sizeof(Stored));
  return value;
}

template <class Stored>
void widen(const std::byte* data, int64_t begin, int64_t count, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = load<Stored>(data, begin + i);
}

/// Index of the first token that is not below `vocab_size`, or -1.
template <class Stored>
int64_t find_too_large(const TokenPiece& piece, int64_t vocab_size) {
  for (int64_t i = 0; i < piece.stored; ++i) {
    if (load<Stored>(piece.data, i) >= vocab_size) return i;
  }
  return -1;
}

void copy_stored(const TokenPiece& piece, int64_t begin, int64_t count, int64_t* out) {
  switch (piece.format) {
    case DataFormat::kUint16:
      return widen<uint16_t>(piece.data, begin, count, out);
    case DataFormat::kUint32:
      return widen<uint32_t>(piece.data, begin, count, out);
    default:
      return widen<uint8_t>(piece.data, begin, count, out);
  }
}

}  // namespace

size_t itemsize(DataFormat format) { return format == DataFormat::kUint16 ? 2 : format == DataFormat::kUint32 ? 4 : 1; }

TokenStream::TokenStream(std::vector<TokenPiece> pieces) : pieces_(std::move(pieces)), begins_{0} {
  for (const auto& piece : pieces_) begins_.push_back(begins_.back() + piece.tokens());
}

uint64_t TokenStream::fingerprint() const {
  uint64_t hash = pieces_.size();
  for (const auto& piece : pieces_) {
    hash = mix64(hash_text(piece.relative, hash) ^ static_cast<uint64_t>(piece.stored));
    hash = mix64(hash ^ static_cast<uint64_t>(piece.skipped) ^ itemsize(piece.format));
  }
  return hash;
}

void TokenStream::copy(int64_t begin, int64_t count, int64_t* out) const {
  TRIREME_CHECK(begin >= 0 && begin + count <= tokens(), "tokens ", begin, " + ", count, " of ", tokens());
  size_t at = static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin()) - 1;
  for (; count > 0; ++at) {
    const TokenPiece& piece = pieces_[at];
    const int64_t inside = begin - begins_[at];
    const int64_t here = std::min(count, piece.tokens() - inside);
    const int64_t stored = std::min(here, piece.stored - inside);
    if (stored > 0) copy_stored(piece, inside, stored, out);
    if (stored < here) out[here - 1] = kDocumentEnd;
    begin += here;
    out += here;
    count -= here;
  }
}

void check_vocabulary(const TokenPiece& piece, int64_t vocab_size) {
  const bool wide = piece.format == DataFormat::kUint32;
  const int64_t at = wide ? find_too_large<uint32_t>(piece, vocab_size) : find_too_large<uint16_t>(piece, vocab_size);
  if (at < 0) return;
  int64_t token = 0;
  copy_stored(piece, at, 1, &token);
  throw DataError(trireme::str(piece.path, ": token ", token, " at position ", piece.skipped + at,
                               " is not below the model's vocab_size=", vocab_size,
                               "; use this model's tokenizer, another data format (is it ", wide ? "uint16" : "uint32",
                               "?), or a vocab_size of at least ", token + 1));
}

}  // namespace trireme
