#include "optim/disk_states.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "trireme/base/error.h"

namespace trireme {

/// Reads and writes a tensor across blocks, in pieces that begin and end anywhere.
class DiskStates::Store final : public SliceStore {
 public:
  Store(DiskStates& states, size_t slice, int tensor, int64_t begin, int64_t numel)
      : states_(states), slice_(slice), tensor_(tensor), begin_(begin), numel_(numel) {}

  at::ScalarType dtype() const override { return states_.slices_[slice_].dtype; }
  int64_t numel() const override { return numel_; }
  bool is_of(size_t slice, int tensor, int64_t begin, int64_t numel) const {
    return slice == slice_ && tensor == tensor_ && begin == begin_ && numel == numel_;
  }

  void read(int64_t begin, std::span<std::byte> to) override {
    const DiskBuffer scratch(kDiskPieceBytes);
    each_piece(begin, to.size(), [&](int64_t offset, int64_t at, int64_t bytes) {
      read_bytes(*states_.file_, offset, to.subspan(at, bytes), scratch);
    });
  }

  void write(int64_t begin, std::span<const std::byte> from) override {
    const DiskBuffer scratch(kDiskPieceBytes);
    each_piece(begin, from.size(), [&](int64_t offset, int64_t at, int64_t bytes) {
      write_bytes(*states_.file_, offset, from.subspan(at, bytes), scratch);
    });
  }

 private:
  /// Calls `use` with the place in the file of bytes [at, at + bytes) of those from `begin` on, block by block.
  template <class Use>
  void each_piece(int64_t begin, size_t bytes, const Use& use) {
    states_.require_whole();
    const int64_t item = states_.itemsize(slice_), first = begin_ * item + begin;
    const int64_t last = first + static_cast<int64_t>(bytes);
    for (const BlockPlace& place : states_.blocks(slice_, first / item, (last + item - 1) / item)) {
      const int64_t from = std::max(first, place.begin * item), to = std::min(last, place.end * item);
      const int64_t tensor = states_.offset(place) + states_.stride(place) * tensor_;
      use(tensor + from - place.begin * item, from - first, to - from);
    }
  }

  DiskStates& states_;
  const size_t slice_;
  const int tensor_;
  const int64_t begin_, numel_;
};

DiskStates::DiskStates(std::vector<Slice> slices, const StatesOnDisk& options)
    : slices_(std::move(slices)), block_numel_(options.block_numel) {
  TRIREME_CHECK(block_numel_ > 0 && block_numel_ % kDiskAlignment == 0 && options.buffers > 0, "blocks of ",
                block_numel_, " elements, ", options.buffers, " buffers");
  int64_t block_bytes = 0;
  for (size_t i = 0; i < slices_.size(); ++i) {
    offsets_.push_back(bytes_);
    if (!has(i)) continue;
    for (const BlockPlace& place : blocks(i, 0, slices_[i].numel)) {
      const int64_t bytes = stride(place) * slices_[i].tensors;
      block_bytes = std::max(block_bytes, bytes);
      bytes_ += bytes;
    }
  }
  try {
    file_ = options.make_file ? options.make_file(options.folder, bytes_) : make_disk_file(options.folder, bytes_);
  } catch (const IoError& error) {
    throw IoError(str("zero_optimization.offload_optimizer.nvme_path: ", error.what()));
  }
  for (int i = 0; i < options.buffers; ++i) buffers_.emplace_back(block_bytes);
  // Half of the transfers are reads.
  queue_ = std::make_unique<DiskQueue>(*file_, std::max(1, options.buffers / 2));
}

DiskStates::~DiskStates() = default;

std::vector<DiskStates::BlockPlace> DiskStates::blocks(size_t slice, int64_t begin, int64_t end) const {
  std::vector<BlockPlace> places;
  for (int64_t at = begin / block_numel_ * block_numel_; at < end; at += block_numel_)
    places.push_back({slice, at, std::min(at + block_numel_, slices_[slice].numel)});
  return places;
}

int64_t DiskStates::offset(const BlockPlace& place) const {
  return offsets_[place.slice] + place.begin * itemsize(place.slice) * slices_[place.slice].tensors;
}

void DiskStates::require_whole() const {
  if (!broken_.empty())
    throw StateError(
        str("optimizer states on disk: an update was cut off (", broken_, "); load a checkpoint into a new engine"));
}

void DiskStates::visit(const std::vector<BlockPlace>& places, Access access,
                       const std::function<void(const BlockPlace&, const std::vector<at::Tensor>&)>& use) {
  require_whole();
  const size_t ahead = std::max<size_t>(1, buffers_.size() / 2);
  std::vector<DiskTransfer> reads(buffers_.size()), writes(buffers_.size());
  const auto memory = [&](size_t index) {
    const BlockPlace& place = places[index];
    return buffers_[index % buffers_.size()].first(stride(place) * slices_[place.slice].tensors);
  };
  size_t begun = 0;
  const auto begin_reads = [&](size_t end) {
    for (; begun < std::min(end, places.size()); ++begun) {
      writes[begun % buffers_.size()].get();  // of the block that had this buffer
      if (access != Access::kWrite) reads[begun % buffers_.size()] = queue_->read(offset(places[begun]), memory(begun));
    }
  };
  try {
    for (size_t i = 0; i < places.size(); ++i) {
      begin_reads(i + ahead);
      reads[i % buffers_.size()].get();
      const Slice& slice = slices_[places[i].slice];
      std::vector<at::Tensor> tensors;
      for (int tensor = 0; tensor < slice.tensors; ++tensor)
        tensors.push_back(at::from_blob(memory(i).data() + stride(places[i]) * tensor,
                                        {places[i].end - places[i].begin}, at::TensorOptions(slice.dtype)));
      use(places[i], tensors);
      if (access != Access::kRead) writes[i % buffers_.size()] = queue_->write(offset(places[i]), memory(i));
    }
    for (DiskTransfer& write : writes) write.get();
  } catch (const std::exception& error) {
    if (access != Access::kRead) broken_ = error.what();
    throw;  // behind the transfers, which use the buffers
  }
}

SliceStore* DiskStates::store(size_t slice, int tensor, int64_t begin, int64_t numel) {
  for (const auto& store : stores_)
    if (store->is_of(slice, tensor, begin, numel)) return store.get();
  return stores_.emplace_back(std::make_unique<Store>(*this, slice, tensor, begin, numel)).get();
}

}  // namespace trireme
