// The shards of a checkpoint: laid out (pure), written and read.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trireme/base/file.h"
#include "trireme/base/state_tree.h"
#include "trireme/checkpoint/manifest.h"
#include "trireme/checkpoint/reshard.h"

namespace trireme {

/// One slice of a shard, in the order of the data.
struct ShardSlice {
  size_t source = 0;  ///< SliceWrite::index: entry of the writing rank's table
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

/// How messages and shards call a slice's tensor: "NAME", and of a part "NAME (dim 1: 0-4)".
std::string label_of(const SavedTensor& tensor, size_t slice);

/// Lays the slices of all ranks out in one shard per rank that has something to write. Pure.
SavePlan plan_shards(std::vector<TensorWrites> writes, int world_size);

/// The bytes of one slice, in memory or where its store has them.
struct SliceBytes {
  std::span<const std::byte> memory;
  SliceStore* store = nullptr;  ///< in place of `memory`
  size_t size = 0;

  explicit SliceBytes(const TensorSlice& slice);
};

/// Writes and syncs a file: the header, then the slices one after the other. Returns the checksums of each slice's
/// blocks.
/// Cost      no copy of slices in memory of 64 KiB and more: a block is hashed, which brings it into the cache, then
///           written from there. Memory for one block of those that have a store.
std::vector<std::vector<uint64_t>> write_shard(FileSystem& files, const std::filesystem::path& path,
                                               const std::string& header, const std::vector<SliceBytes>& slices);

/// Reads slices of one checkpoint's shards. Opens each file once.
class ShardReader {
 public:
  ShardReader(FileSystem& files, const std::filesystem::path& checkpoint, const Manifest& manifest);

  /// Checks size and header of the file that holds `read`. Throws CheckpointError naming file and tensor.
  void check_file(const SliceRead& read);

  /// Takes bytes of the destination, from byte `begin` on.
  using Take = std::function<void(int64_t begin, std::span<const std::byte> bytes)>;

  /// Reads and verifies every block that `read` touches, each once; `destination` gets the wanted bytes in place.
  /// Throws    CheckpointError naming file, tensor and elements; IoError.
  void read(const SliceRead& read, std::byte* destination);
  /// As read(), piece by piece; without `take` the blocks are only verified.
  void read(const SliceRead& read, const Take& take);

 private:
  const SavedTensor& tensor_of(const SliceRead& read) const { return manifest_.tensors[read.tensor]; }
  const SavedSlice& slice_of(const SliceRead& read) const { return tensor_of(read).slices[read.slice]; }
  ReadableFile& open(const SliceRead& read);
  std::string describe(const SliceRead& read) const;
  void verify(const SliceRead& read, int64_t block, std::span<const std::byte> data) const;
  void read_blocks(const SliceRead& read, std::byte* destination, const Take& take);

  FileSystem& files_;
  const std::filesystem::path checkpoint_;
  const Manifest& manifest_;
  std::vector<std::unique_ptr<ReadableFile>> open_;  ///< [files], nullptr: not yet
  std::vector<std::byte> scratch_;                   ///< one block, of which only a part is wanted
};

}  // namespace trireme
