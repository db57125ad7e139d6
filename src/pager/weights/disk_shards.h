// This rank's shards of units on disk: a gather reads them, and they are in memory only while they are updated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/state_tree.h"
#include "trireme/device/disk.h"
#include "trireme/pager/layout/policy.h"

namespace trireme {

/// One thread at a time uses this. All functions throw IoError where the disk fails; where that was a write, everything
/// throws StateError from then on, since what a shard has is not known.
class DiskShards {
 public:
  struct Shard {
    std::string name;  ///< of its unit
    int64_t numel = 0;
    at::ScalarType dtype = at::kFloat;
  };

  /// All is zeros. Throws IoError: the disk has no space.
  DiskShards(std::vector<Shard> shards, const WeightsOnDisk& options);
  ~DiskShards();

  /// [numel]. Its memory is there from bring() to put_back() or drop(); in between to read it is an error that names
  /// the unit. Lives as long as this does.
  const at::Tensor& tensor(int index) const { return places_[index].tensor; }
  /// On return the tensor has the shard. Of `next`, in this order, shards are begun to be read as far as there are
  /// buffers for them.
  void bring(int index, std::span<const int> next = {});
  /// A shard that was brought goes back to the disk, beside the program.
  void put_back(int index);
  /// A shard that was brought, or is being read ahead, is dropped.
  void drop(int index) noexcept;
  /// Waits for all that was put back.
  void settle();

  /// Begins to read the shard into `to`, [numel].
  DiskTransfer read(int index, const at::Tensor& to);
  /// Replaces the shard, [numel].
  void write(int index, const at::Tensor& from);
  /// `numel` elements of the shard, from `begin` on. Lives as long as this does.
  SliceStore* store(int index, int64_t begin, int64_t numel);

  /// [numel] of `options`, where the disk can read without a copy by the host: it begins at a multiple of
  /// kDiskAlignment.
  static at::Tensor memory(int64_t numel, const at::TensorOptions& options);

  DiskUse use() const { return DiskUse{.bytes = bytes_} + queue_->use(); }

 private:
  class Memory;
  class Store;
  enum class State { kOnDisk, kComing, kHere, kLeaving };
  struct Place {
    State state = State::kOnDisk;
    int64_t offset = 0;
    at::Tensor tensor;
    std::shared_ptr<Memory> memory;
    std::optional<DiskBuffer> buffer;  // unless it is on disk
    DiskTransfer transfer;
  };

  int64_t bytes_of(int index) const {
    return shards_[index].numel * static_cast<int64_t>(c10::elementSize(shards_[index].dtype));
  }
  std::span<std::byte> buffer_of(int index) { return places_[index].buffer->first(disk_aligned(bytes_of(index))); }
  /// Nothing of the shard is in memory or on its way.
  void await_disk(int index);
  void begin_read(int index);
  void finish_write(int index);
  void take_memory(int index);
  void forbid_reading(int index) noexcept;
  void leave(int index) noexcept;
  void require_whole() const;
  [[noreturn]] void fail(const IoError& error);

  const std::vector<Shard> shards_;
  const size_t ahead_;  ///< shards that are read ahead; as many are being written
  int64_t bytes_ = 0;
  std::string broken_;  ///< why; empty: it is not
  std::vector<Place> places_;
  std::deque<int> leaving_;  ///< in the order in which they were put back
  size_t coming_ = 0;
  std::unique_ptr<DiskFile> file_;
  std::vector<std::unique_ptr<Store>> stores_;
  std::unique_ptr<DiskQueue> queue_;  // after what it works on
};

}  // namespace trireme
