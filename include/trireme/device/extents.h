// Extents of bytes in a file on disk: each is in memory only while it is used, read ahead of that and written behind
// it.
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/state_tree.h"
#include "trireme/device/disk.h"

namespace trireme {

/// One thread at a time uses this. All functions throw IoError where the disk fails; where that was a write, everything
/// throws StateError from then on, since what an extent has is not known.
class Extents {
 public:
  struct Names {
    const char* key;   ///< of the configuration, which gave the folder
    const char* what;  ///< is there: "weights on disk"
  };

  /// Extents of `sizes`, of zeros. Throws IoError, which names the key: the disk has no space.
  Extents(std::vector<Bytes> sizes, const DiskSpace& space, const Names& names);
  ~Extents();
  Extents(const Extents&) = delete;
  Extents& operator=(const Extents&) = delete;

  /// On return the extent is in memory, until put_back() or drop(). Of `next`, in this order, extents are begun to be
  /// read as far as there are buffers for them.
  std::span<std::byte> bring(int extent, std::span<const int> next = {});
  /// bring() for who writes all of it: what it has is not read.
  std::span<std::byte> take(int extent);
  /// An extent that is in memory goes back to the disk, beside the program.
  void put_back(int extent);
  /// An extent that is in memory, or is being read ahead, is dropped.
  void drop(int extent) noexcept;
  /// Waits for all that was put back.
  void settle();
  /// Gives idle buffers back, which are kept for the next extents of their size.
  void free_buffers() { idle_.clear(); }
  /// How many extents of bring()'s `next` are read at a time.
  int ahead() const { return ahead_; }

  /// Begins to read the extent into `to`.
  DiskTransfer read(int extent, std::span<std::byte> to);
  /// Replaces the extent.
  void write(int extent, std::span<const std::byte> from);

  struct Piece {
    int extent;
    Bytes begin;
    Bytes size;
    auto operator<=>(const Piece&) const = default;
  };
  /// The bytes of `pieces`, one behind the other, as elements of `dtype`. Lives as long as this does.
  SliceStore* slice(at::ScalarType dtype, std::vector<Piece> pieces);

  /// Throws StateError: a write has failed.
  void require_whole() const;
  /// The extents' contents are of no use from here on, `why`.
  void break_off(const std::string& why);

  DiskUse use() const { return DiskUse{.bytes = bytes_} + queue_->use(); }

  /// [numel] of `options`, where the disk can read without a copy by the host: it begins at a multiple of
  /// kDiskAlignment.
  static at::Tensor memory(int64_t numel, const at::TensorOptions& options);

 private:
  class Slice;
  enum class State { kOnDisk, kComing, kHere, kLeaving };
  struct Place {
    State state = State::kOnDisk;
    int64_t offset = 0;
    std::optional<DiskBuffer> buffer;  // unless it is on disk
    DiskTransfer transfer;
  };

  std::span<std::byte> memory_of(int extent) {
    return places_[extent].buffer->first(disk_aligned(sizes_[extent].count));
  }
  /// Nothing of the extent is in memory or on its way.
  void await_disk(int extent);
  void begin_read(int extent);
  void finish_write(int extent);
  void take_buffer(int extent);
  void leave(int extent) noexcept;
  [[noreturn]] void fail(const IoError& error);

  const std::vector<Bytes> sizes_;
  const Names names_;
  const int ahead_, behind_;  ///< extents that are being read ahead, and written, at a time
  int64_t bytes_ = 0;
  std::string broken_;  ///< why; empty: it is not
  std::vector<Place> places_;
  std::deque<int> leaving_;  ///< in the order in which they were put back
  int coming_ = 0;
  std::multimap<int64_t, DiskBuffer> idle_;  ///< by bytes
  std::unique_ptr<DiskFile> file_;
  std::map<std::pair<at::ScalarType, std::vector<Piece>>, std::unique_ptr<Slice>> slices_;
  std::unique_ptr<DiskQueue> queue_;  // after what it works on
};

}  // namespace trireme
