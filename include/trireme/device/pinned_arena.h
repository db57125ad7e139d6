// Page-locked memory in few large blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme {

/// Gives out pieces of page-locked memory, freed all together with the arena. libtorch rounds each request up to a
/// power of two, so many pieces could cost up to twice their size; the arena's blocks are powers of two already.
class PinnedArena {
 public:
  PinnedArena() = default;  ///< a block per piece, on the host
  /// For about `bytes` of pieces in all (more are possible), for copies from and to `device`.
  PinnedArena(int64_t bytes, c10::Device device) : device_(device), expected_(bytes) {}

  /// [numel], not initialized, aligned to 512 bytes.
  at::Tensor take(int64_t numel, at::ScalarType dtype);
  int64_t bytes() const { return bytes_; }  ///< of all blocks

 private:
  c10::Device device_{c10::kCPU};
  int64_t expected_ = 0;  // still to be taken
  at::Tensor block_;      // [bytes] uint8; the pieces keep the ones before alive
  int64_t used_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace trireme
