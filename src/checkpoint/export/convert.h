// Functions that the writers of all layouts share.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "trireme/base/file.h"
#include "trireme/checkpoint/convert.h"

namespace trireme {

/// A source's tensors, block by block, with progress.
class BlockReader {
 public:
  BlockReader(const CheckpointSource& source, const ConvertOptions& options, int64_t total_bytes);

  /// Reads elements [begin, begin + numel) of a tensor and hands them on in blocks of at most kConvertBlockBytes.
  void read(size_t tensor, int64_t begin, int64_t numel, const std::function<void(std::span<const std::byte>)>& take);
  /// The end: progress says that all is done.
  void finish();

 private:
  const CheckpointSource& source_;
  const ConvertOptions& options_;
  const int64_t total_;
  int64_t done_ = 0;
  TensorReader reader_;
  std::vector<std::byte> block_;
};

/// A multiple of kChecksumBlockBytes.
inline constexpr int64_t kConvertBlockBytes = int64_t{4} << 20;

/// The tag that the copy gets. Throws CheckpointError: no tag.
std::string tag_of_copy(const CheckpointSource& source, const ConvertOptions& options);

}  // namespace trireme
