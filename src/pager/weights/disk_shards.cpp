#include "pager/weights/disk_shards.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "trireme/intercept.h"

namespace trireme {

namespace {

constexpr int kThreads = 4;

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

}  // namespace

/// The owner of a tensor's storage. Views of it may be made at any time.
class DiskShards::Memory final : public ManagedStorage {
 public:
  void before_access(Access) override {}
};

class DiskShards::Store final : public SliceStore {
 public:
  Store(DiskShards& shards, int index, int64_t begin, int64_t numel)
      : shards_(shards), index_(index), begin_(begin), numel_(numel) {}

  at::ScalarType dtype() const override { return shards_.shards_[index_].dtype; }
  int64_t numel() const override { return numel_; }
  bool is_of(int index, int64_t begin, int64_t numel) const {
    return index == index_ && begin == begin_ && numel == numel_;
  }

  void read(int64_t begin, std::span<std::byte> to) override {
    shards_.await_disk(index_);
    read_bytes(*shards_.file_, offset(begin), to, DiskBuffer(kDiskPieceBytes));
  }
  void write(int64_t begin, std::span<const std::byte> from) override {
    shards_.await_disk(index_);
    try {
      write_bytes(*shards_.file_, offset(begin), from, DiskBuffer(kDiskPieceBytes));
    } catch (const IoError& error) {
      shards_.fail(error);
    }
  }

 private:
  int64_t offset(int64_t begin) const {
    return shards_.places_[index_].offset + begin_ * static_cast<int64_t>(c10::elementSize(dtype())) + begin;
  }

  DiskShards& shards_;
  const int index_;
  const int64_t begin_, numel_;
};

DiskShards::DiskShards(std::vector<Shard> shards, const WeightsOnDisk& options)
    : shards_(std::move(shards)), ahead_(std::max(1, (options.buffers - 1) / 2)), places_(shards_.size()) {
  for (int i = 0; i < static_cast<int>(shards_.size()); ++i) {
    Place& place = places_[i];
    place.offset = bytes_;
    bytes_ += disk_aligned(bytes_of(i));
    place.memory = std::make_shared<Memory>();
    const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes_of(i), at::DataPtr(nullptr, c10::kCPU), nullptr,
                               /*resizable=*/false);
    place.tensor = at::empty({0}, at::TensorOptions(shards_[i].dtype)).set_(storage, 0, {shards_[i].numel}, {1});
    leave(i);
  }
  try {
    file_ = options.make_file ? options.make_file(options.folder, bytes_) : make_disk_file(options.folder, bytes_);
  } catch (const IoError& error) {
    throw IoError(str("zero_optimization.offload_param.nvme_path: ", error.what()));
  }
  queue_ = std::make_unique<DiskQueue>(*file_, kThreads);
}

DiskShards::~DiskShards() = default;

void DiskShards::require_whole() const {
  if (!broken_.empty())
    throw StateError(
        str("weights on disk: they could not be written (", broken_, "); load a checkpoint into a new engine"));
}

void DiskShards::fail(const IoError& error) {
  if (broken_.empty()) broken_ = error.what();
  throw error;
}

void DiskShards::take_memory(int index) { places_[index].buffer.emplace(disk_aligned(bytes_of(index))); }

void DiskShards::begin_read(int index) {
  Place& place = places_[index];
  take_memory(index);
  place.transfer = queue_->read_pieces(place.offset, buffer_of(index));
  place.state = State::kComing;
  ++coming_;
}

void DiskShards::bring(int index, std::span<const int> next) {
  require_whole();
  Place& place = places_[index];
  if (place.state == State::kLeaving) finish_write(index);
  if (place.state == State::kOnDisk) begin_read(index);
  if (place.state == State::kComing) {
    --coming_;
    place.state = State::kHere;  // what it waits for may fail
    try {
      place.transfer.get();
    } catch (...) {
      leave(index);
      throw;
    }
    auto& storage = *place.tensor.storage().unsafeGetStorageImpl();
    StorageHandle::point(storage, place.buffer->data(), bytes_of(index), place.memory);
  }
  for (const int later : next) {
    if (coming_ >= ahead_) return;
    if (places_[later].state == State::kOnDisk) begin_read(later);
  }
}

void DiskShards::put_back(int index) {
  Place& place = places_[index];
  if (place.state == State::kComing) drop(index);
  if (place.state != State::kHere) return;
  forbid_reading(index);
  place.transfer = queue_->write_pieces(place.offset, buffer_of(index));
  place.state = State::kLeaving;
  leaving_.push_back(index);
  while (leaving_.size() > ahead_) finish_write(leaving_.front());
}

void DiskShards::drop(int index) noexcept {
  Place& place = places_[index];
  if (place.state == State::kComing) {
    place.transfer = {};
    --coming_;
  }
  if (place.state == State::kComing || place.state == State::kHere) leave(index);
}

void DiskShards::forbid_reading(int index) noexcept {
  StorageHandle::release(*places_[index].tensor.storage().unsafeGetStorageImpl(), places_[index].memory,
                         str("the owned weights of unit '", shards_[index].name,
                             "' are on disk (zero_optimization.offload_param): they have memory only in an update"));
}

/// The shard has no memory from here on.
void DiskShards::leave(int index) noexcept {
  Place& place = places_[index];
  forbid_reading(index);
  place.buffer.reset();
  place.state = State::kOnDisk;
}

void DiskShards::finish_write(int index) {
  Place& place = places_[index];
  leaving_.erase(std::find(leaving_.begin(), leaving_.end(), index));
  place.state = State::kOnDisk;
  try {
    place.transfer.get();
  } catch (const IoError& error) {
    place.buffer.reset();
    fail(error);
  }
  place.buffer.reset();
}

void DiskShards::settle() {
  while (!leaving_.empty()) finish_write(leaving_.front());
}

void DiskShards::await_disk(int index) {
  require_whole();
  const State state = places_[index].state;
  TRIREME_CHECK(state != State::kHere, "unit ", shards_[index].name, " is being updated");
  if (state == State::kLeaving) finish_write(index);
  if (state == State::kComing) drop(index);
}

DiskTransfer DiskShards::read(int index, const at::Tensor& to) {
  await_disk(index);
  return queue_->read_pieces(places_[index].offset, trireme::bytes_of(to));
}

void DiskShards::write(int index, const at::Tensor& from) {
  await_disk(index);
  take_memory(index);
  std::memcpy(places_[index].buffer->data(), from.const_data_ptr(), from.nbytes());
  DiskTransfer transfer = queue_->write_pieces(places_[index].offset, buffer_of(index));
  try {
    transfer.get();
  } catch (const IoError& error) {
    places_[index].buffer.reset();
    fail(error);
  }
  places_[index].buffer.reset();
}

at::Tensor DiskShards::memory(int64_t numel, const at::TensorOptions& options) {
  const auto bytes = static_cast<int64_t>(options.dtype().itemsize()) * numel;
  const auto buffer = std::make_shared<DiskBuffer>(bytes);  // shared: a deleter can be copied
  return at::from_blob(
      buffer->data(), {numel}, [buffer](void*) {}, options);
}

SliceStore* DiskShards::store(int index, int64_t begin, int64_t numel) {
  for (const auto& store : stores_)
    if (store->is_of(index, begin, numel)) return store.get();
  return stores_.emplace_back(std::make_unique<Store>(*this, index, begin, numel)).get();
}

}  // namespace trireme
