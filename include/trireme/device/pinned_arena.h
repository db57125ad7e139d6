// Page-locked memory in few large blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme {

/// Gives out pieces of page-locked memory and takes none back before its end: libtorch rounds each request up to a
/// power of two, so that many odd ones would cost up to twice what they ask for. Blocks are powers of two already.
class PinnedArena {
 public:
  PinnedArena() = default;  ///< of nothing
  /// `bytes` of pieces will be taken in all, for copies from and to `device`; more are possible.
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
