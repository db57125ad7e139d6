// Masters and states of slices on disk: read ahead of an update and written behind it, block by block.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/base/state_tree.h"
#include "trireme/device/disk.h"
#include "trireme/optim/options.h"

namespace trireme {

/// The tensors of a slice lie side by side in blocks of StatesOnDisk::block_numel elements: one transfer brings all
/// that an update of the block needs. One thread at a time uses this.
class DiskStates {
 public:
  struct Slice {
    int64_t numel = 0;
    int tensors = 0;  ///< of each element; 0: nothing of the slice is here
    at::ScalarType dtype = at::kFloat;
  };

  struct BlockPlace {
    size_t slice = 0;
    int64_t begin = 0;  ///< element of the slice
    int64_t end = 0;
  };

  /// All is zeros. Throws IoError: the disk has no space.
  DiskStates(std::vector<Slice> slices, const StatesOnDisk& options);

  ~DiskStates();

  /// The blocks of `slice` that have elements of [begin, end).
  std::vector<BlockPlace> blocks(size_t slice, int64_t begin, int64_t end) const;

  enum class Access { kRead, kWrite, kUpdate };
  /// Calls `use` with each of `places`, in their order, and the tensors of that block. kWrite: their contents are
  /// undefined, and `use` fills all of them; kRead: what it writes is dropped.
  ///
  /// Throws    IoError, and what `use` throws. What was written is of no use then, unless by kRead: from here on
  ///           everything throws StateError.
  void visit(const std::vector<BlockPlace>& places, Access access,
             const std::function<void(const BlockPlace& place, const std::vector<at::Tensor>& tensors)>& use);

  /// `numel` elements of tensor `tensor` of `slice`, from `begin` on. Lives as long as this does.
  SliceStore* store(size_t slice, int tensor, int64_t begin, int64_t numel);

  DiskUse use() const { return DiskUse{.bytes = bytes_} + queue_->use(); }
  bool has(size_t slice) const { return slices_[slice].tensors > 0; }

 private:
  class Store;

  int64_t itemsize(size_t slice) const { return static_cast<int64_t>(c10::elementSize(slices_[slice].dtype)); }
  /// Bytes of one tensor of a block, with the padding after it.
  int64_t stride(const BlockPlace& place) const {
    return disk_aligned((place.end - place.begin) * itemsize(place.slice));
  }
  int64_t offset(const BlockPlace& place) const;
  void require_whole() const;

  const std::vector<Slice> slices_;
  const int64_t block_numel_;
  std::vector<int64_t> offsets_;  ///< of the slices, in the file
  int64_t bytes_ = 0;
  std::string broken_;  ///< why; empty: it is not
  std::unique_ptr<DiskFile> file_;
  std::vector<DiskBuffer> buffers_;
  std::vector<std::unique_ptr<Store>> stores_;
  std::unique_ptr<DiskQueue> queue_;  // after what it works on
};

}  // namespace trireme
