#include <algorithm>

#include "checkpoint/layouts/deepspeed/parts.h"

namespace trireme::deepspeed {

void FlatSpace::append(const Piece& piece) {
  if (piece.numel == 0) return;
  pieces_.push_back(piece);
  begins_.push_back(numel_);
  numel_ += piece.numel;
}

std::vector<SavedSlice> FlatSpace::cut(int64_t begin, int64_t numel, int64_t tensor_begin, int64_t itemsize) const {
  std::vector<SavedSlice> slices;
  // The last piece that begins at or before `begin`.
  size_t index = std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin();
  for (int64_t next = begin; next < begin + numel; ++index) {
    const Piece& piece = pieces_[index - 1];
    const int64_t within = next - begins_[index - 1];
    const int64_t count = std::min(piece.numel - within, begin + numel - next);
    slices.push_back({.file = piece.file,
                      .begin = tensor_begin + next - begin,
                      .numel = count,
                      .offset = piece.offset + within * itemsize,
                      .bytes = count * itemsize,
                      .checksums = {}});
    next += count;
  }
  return slices;
}

}  // namespace trireme::deepspeed
