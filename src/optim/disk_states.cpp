#include "optim/disk_states.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace trireme {

DiskStates::DiskStates(std::vector<Slice> slices, const DiskSpace& space)
    : slices_(std::move(slices)),
      block_numel_(space.block_numel),
      extents_(place_slices(), space, {"zero_optimization.offload_optimizer.nvme_path", "optimizer states on disk"}) {}

std::vector<Bytes> DiskStates::place_slices() {
  TRIREME_CHECK(block_numel_ > 0 && block_numel_ % kDiskAlignment == 0, "blocks of ", block_numel_, " elements");
  std::vector<Bytes> sizes;
  for (size_t i = 0; i < slices_.size(); ++i) {
    first_extents_.push_back(static_cast<int>(sizes.size()));
    if (!has(i)) continue;
    for (const BlockPlace& place : blocks(i, 0, slices_[i].numel)) sizes.push_back(slices_[i].tensors * stride(place));
  }
  return sizes;
}

std::vector<DiskStates::BlockPlace> DiskStates::blocks(size_t slice, int64_t begin, int64_t end) const {
  std::vector<BlockPlace> places;
  for (int64_t at = begin / block_numel_ * block_numel_; at < end; at += block_numel_)
    places.push_back({slice, at, std::min(at + block_numel_, slices_[slice].numel)});
  return places;
}

void DiskStates::visit(const std::vector<BlockPlace>& places, Access access,
                       const std::function<void(const BlockPlace&, const std::vector<at::Tensor>&)>& use) {
  extents_.require_whole();
  std::vector<int> order;
  for (const BlockPlace& place : places) order.push_back(extent(place));
  try {
    for (size_t i = 0; i < places.size(); ++i) {
      const std::span<std::byte> memory = access == Access::kWrite
                                              ? extents_.take(order[i])
                                              : extents_.bring(order[i], std::span(order).subspan(i + 1));
      const Slice& slice = slices_[places[i].slice];
      std::vector<at::Tensor> tensors;
      for (int tensor = 0; tensor < slice.tensors; ++tensor)
        tensors.push_back(at::from_blob(memory.data() + (tensor * stride(places[i])).count,
                                        {places[i].end - places[i].begin}, at::TensorOptions(slice.dtype)));
      use(places[i], tensors);
      access == Access::kRead ? extents_.drop(order[i]) : extents_.put_back(order[i]);
    }
    extents_.settle();
  } catch (const std::exception& error) {
    for (const int extent : order) extents_.drop(extent);
    if (access != Access::kRead) extents_.break_off(error.what());
    throw;
  }
}

SliceStore* DiskStates::store(size_t slice, int tensor, int64_t begin, int64_t numel) {
  std::vector<Extents::Piece> pieces;
  const at::ScalarType dtype = slices_[slice].dtype;
  for (const BlockPlace& place : blocks(slice, begin, begin + numel)) {
    const int64_t from = std::max(begin, place.begin), to = std::min(begin + numel, place.end);
    pieces.push_back(
        {extent(place), tensor * stride(place) + bytes_of(from - place.begin, dtype), bytes_of(to - from, dtype)});
  }
  return extents_.slice(dtype, std::move(pieces));
}

}  // namespace trireme
