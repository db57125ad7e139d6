// Functions that the writers of all layouts share.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/file.h"
#include "trireme/checkpoint/convert.h"

namespace trireme {

/// Tells how many bytes of a work are done: several times per second, and at the end.
class ByteProgress {
 public:
  using Tell = std::function<void(int64_t done_bytes, int64_t total_bytes)>;
  /// Without `tell` nobody listens.
  explicit ByteProgress(Tell tell = {}, int64_t total_bytes = 0) : tell_(std::move(tell)), total_(total_bytes) {}

  void add(int64_t bytes);
  /// All is done, as far as it was not told yet.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  const Tell tell_;
  const int64_t total_;
  int64_t done_ = 0;
  int64_t told_ = -1;
  Clock::time_point last_{};
};

/// A multiple of kChecksumBlockBytes.
inline constexpr int64_t kPieceBytes = int64_t{4} << 20;

/// A source's tensors, piece by piece, so that memory for one piece is enough.
class PieceReader {
 public:
  /// Elements of a tensor from `begin` on, in its dtype; they last until the next piece.
  struct Piece {
    int64_t begin = 0;
    int64_t numel = 0;
    std::span<std::byte> bytes;
  };

  /// `progress` counts what is read.
  explicit PieceReader(const CheckpointSource& source, ByteProgress* progress = nullptr)
      : source_(source), progress_(progress), reader_(source), bytes_(kPieceBytes) {}

  /// Reads elements [begin, begin + numel) of a tensor and hands them on in pieces of at most kPieceBytes. Throws as
  /// TensorReader::read().
  void read(size_t tensor, int64_t begin, int64_t numel, const std::function<void(const Piece&)>& take);

 private:
  const CheckpointSource& source_;
  ByteProgress* const progress_;
  TensorReader reader_;
  std::vector<std::byte> bytes_;
};

/// The tag that the copy gets. Throws CheckpointError: no tag.
std::string tag_of_copy(const CheckpointSource& source, const ConvertOptions& options);

}  // namespace trireme
