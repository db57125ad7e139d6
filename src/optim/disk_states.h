// Masters and states of slices on disk: read ahead of an update and written behind it, block by block.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "trireme/device/extents.h"

namespace trireme {

/// The tensors of a slice lie side by side in blocks of DiskSpace::block_numel elements, each an extent: one transfer
/// brings all that an update of the block needs. One thread at a time uses this.
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
  DiskStates(std::vector<Slice> slices, const DiskSpace& space);

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

  DiskUse use() const { return extents_.use(); }
  bool has(size_t slice) const { return slices_[slice].tensors > 0; }

 private:
  int extent(const BlockPlace& place) const {
    return first_extents_[place.slice] + static_cast<int>(place.begin / block_numel_);
  }
  /// One tensor of a block, with the padding after it.
  Bytes stride(const BlockPlace& place) const {
    return {disk_aligned(bytes_of(place.end - place.begin, slices_[place.slice].dtype).count)};
  }
  /// The sizes of all extents; sets where those of each slice begin.
  std::vector<Bytes> place_slices();

  const std::vector<Slice> slices_;
  const int64_t block_numel_;
  std::vector<int> first_extents_;  ///< by slice
  Extents extents_;
};

}  // namespace trireme
