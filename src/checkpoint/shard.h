// The shards of a checkpoint: laid out (pure), written and read.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trireme/base/file.h"
#include "trireme/checkpoint/manifest.h"
#include "trireme/checkpoint/reshard.h"

namespace trireme {

/// One slice of a shard, in the order of the data.
struct ShardSlice {
  size_t source = 0;  ///< entry of the writing rank's table
  size_t tensor = 0;  ///< of Manifest::tensors
  size_t slice = 0;   ///< of SavedTensor::slices
};

struct ShardPlan {
  int rank = 0;  ///< that writes it
  std::string header;
  std::vector<ShardSlice> slices;
};

/// Everything about a checkpoint but the checksums of its data, the values and the versions.
struct SavePlan {
  Manifest manifest;
  std::vector<ShardPlan> shards;  ///< shards[i] is manifest.files[i]
};

/// Lays the slices of all ranks out in one shard per rank that has something to write. Pure: all ranks get the same.
/// Throws    CheckpointError as plan_writes.
SavePlan plan_shards(const std::vector<std::vector<SliceSpec>>& table_of_rank);

/// Writes and syncs a file: the header, then the parts one after the other. Returns the checksums of each part's
/// blocks.
/// Cost      no copy of parts of 64 KiB and more: a block is hashed, which brings it into the cache, then written from there.
std::vector<std::vector<uint64_t>> write_shard(FileSystem& files, const std::filesystem::path& path,
                                               const std::string& header,
                                               const std::vector<std::span<const std::byte>>& parts);

/// Reads slices of one checkpoint's shards. Opens each file once.
class ShardReader {
 public:
  ShardReader(FileSystem& files, const std::filesystem::path& checkpoint, const Manifest& manifest);

  /// Checks size and header of the file that holds `read`. Throws CheckpointError naming file and tensor.
  void check_file(const SliceRead& read);

  /// Reads and verifies every block that `read` touches; `destination` gets the wanted bytes, nullptr: only verified.
  /// Throws    CheckpointError naming file, tensor and elements; IoError.
  void read(const SliceRead& read, std::byte* destination);

 private:
  ReadableFile& open(const SliceRead& read);
  std::string describe(const SliceRead& read) const;
  void verify(const SliceRead& read, int64_t block, std::span<const std::byte> data) const;

  FileSystem& files_;
  const std::filesystem::path checkpoint_;
  const Manifest& manifest_;
  std::vector<std::unique_ptr<ReadableFile>> open_;  ///< [files], nullptr: not yet
  std::vector<std::byte> scratch_;                   ///< one block, of which only a part is wanted
};

}  // namespace trireme
