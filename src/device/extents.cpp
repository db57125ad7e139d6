#include "trireme/device/extents.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

namespace trireme {

/// Reads and writes across pieces, from and to any byte.
class Extents::Slice final : public SliceStore {
 public:
  Slice(Extents& extents, at::ScalarType dtype, std::vector<Piece> pieces)
      : extents_(extents), dtype_(dtype), pieces_(std::move(pieces)) {}

  at::ScalarType dtype() const override { return dtype_; }
  int64_t numel() const override {
    int64_t bytes = 0;
    for (const Piece& piece : pieces_) bytes += piece.size.count;
    return bytes / static_cast<int64_t>(c10::elementSize(dtype_));
  }

  void read(Bytes begin, std::span<std::byte> to) override {
    const DiskBuffer scratch(kDiskPieceBytes);
    each_piece(begin, to,
               [&](int64_t offset, std::span<std::byte> part) { read_bytes(*extents_.file_, offset, part, scratch); });
  }
  void write(Bytes begin, std::span<const std::byte> from) override {
    const DiskBuffer scratch(kDiskPieceBytes);
    try {
      each_piece(begin, from, [&](int64_t offset, std::span<const std::byte> part) {
        write_bytes(*extents_.file_, offset, part, scratch);
      });
    } catch (const IoError& error) {
      extents_.fail(error);
    }
  }

 private:
  /// Calls `use` with each part of `memory` that lies in one piece, and its place in the file.
  template <class Memory, class Use>
  void each_piece(Bytes begin, Memory memory, const Use& use) {
    int64_t skipped = begin.count;
    for (const Piece& piece : pieces_) {
      if (memory.empty()) return;
      const int64_t bytes = std::min<int64_t>(piece.size.count - skipped, memory.size());
      if (bytes > 0) {
        extents_.await_disk(piece.extent);
        use(extents_.places_[piece.extent].offset + piece.begin.count + skipped, memory.first(bytes));
        memory = memory.subspan(bytes);
      }
      skipped = std::max<int64_t>(0, skipped - piece.size.count);
    }
  }

  Extents& extents_;
  const at::ScalarType dtype_;
  const std::vector<Piece> pieces_;
};

Extents::Extents(std::vector<Bytes> sizes, const DiskSpace& space, const Names& names)
    : sizes_(std::move(sizes)),
      names_(names),
      ahead_(std::max(0, (space.buffers - 1) / 2)),
      behind_(std::max(0, space.buffers - 1 - ahead_)),
      places_(sizes_.size()) {
  for (size_t i = 0; i < sizes_.size(); ++i) {
    places_[i].offset = bytes_;
    bytes_ += disk_aligned(sizes_[i].count);
  }
  try {
    file_ = space.make_file ? space.make_file(space.folder, bytes_) : make_disk_file(space.folder, bytes_);
  } catch (const IoError& error) {
    throw IoError(str(names.key, ": ", error.what()));
  }
  queue_ = std::make_unique<DiskQueue>(*file_, std::max(1, ahead_ + behind_));
}

Extents::~Extents() = default;

void Extents::require_whole() const {
  if (!broken_.empty())
    throw StateError(str(names_.what, ": not all was written (", broken_, "); load a checkpoint into a new engine"));
}

void Extents::break_off(const std::string& why) {
  if (broken_.empty()) broken_ = why;
}

void Extents::fail(const IoError& error) {
  break_off(error.what());
  throw error;
}

void Extents::take_buffer(int extent) {
  const int64_t bytes = disk_aligned(sizes_[extent].count);
  const auto idle = idle_.find(bytes);
  if (idle == idle_.end()) {
    idle_.clear();  // so that there are never more buffers than extents in memory at a time
    places_[extent].buffer.emplace(bytes);
    return;
  }
  places_[extent].buffer = std::move(idle->second);
  idle_.erase(idle);
}

/// The extent has no memory from here on.
void Extents::leave(int extent) noexcept {
  Place& place = places_[extent];
  if (place.buffer) idle_.emplace(disk_aligned(sizes_[extent].count), *std::exchange(place.buffer, std::nullopt));
  place.state = State::kOnDisk;
}

void Extents::begin_read(int extent) {
  Place& place = places_[extent];
  take_buffer(extent);
  place.transfer = queue_->read(place.offset, memory_of(extent));
  place.state = State::kComing;
  ++coming_;
}

std::span<std::byte> Extents::bring(int extent, std::span<const int> next) {
  require_whole();
  Place& place = places_[extent];
  if (place.state == State::kLeaving) finish_write(extent);
  if (place.state == State::kOnDisk) begin_read(extent);
  if (place.state == State::kComing) {
    --coming_;
    place.state = State::kHere;  // what it waits for may fail
    try {
      for (const int later : next) {
        if (coming_ >= ahead_) break;
        if (places_[later].state == State::kOnDisk) begin_read(later);
      }
      place.transfer.get();
    } catch (...) {
      leave(extent);
      throw;
    }
  }
  return memory_of(extent).first(sizes_[extent].count);
}

std::span<std::byte> Extents::take(int extent) {
  await_disk(extent);
  take_buffer(extent);
  places_[extent].state = State::kHere;
  return memory_of(extent).first(sizes_[extent].count);
}

void Extents::put_back(int extent) {
  Place& place = places_[extent];
  if (place.state == State::kComing) drop(extent);
  if (place.state != State::kHere) return;
  place.transfer = queue_->write(place.offset, memory_of(extent));
  place.state = State::kLeaving;
  leaving_.push_back(extent);
  while (static_cast<int>(leaving_.size()) > behind_) finish_write(leaving_.front());
}

void Extents::drop(int extent) noexcept {
  Place& place = places_[extent];
  if (place.state == State::kComing) {
    place.transfer = {};
    --coming_;
  }
  if (place.state == State::kComing || place.state == State::kHere) leave(extent);
}

void Extents::finish_write(int extent) {
  leaving_.erase(std::find(leaving_.begin(), leaving_.end(), extent));
  try {
    places_[extent].transfer.get();
  } catch (const IoError& error) {
    leave(extent);
    fail(error);
  }
  leave(extent);
}

void Extents::settle() {
  while (!leaving_.empty()) finish_write(leaving_.front());
}

void Extents::await_disk(int extent) {
  require_whole();
  const State state = places_[extent].state;
  TRIREME_CHECK(state != State::kHere, names_.what, ": extent ", extent, " is in memory");
  if (state == State::kLeaving) finish_write(extent);
  if (state == State::kComing) drop(extent);
}

DiskTransfer Extents::read(int extent, std::span<std::byte> to) {
  await_disk(extent);
  return queue_->read(places_[extent].offset, to);
}

void Extents::write(int extent, std::span<const std::byte> from) {
  std::memcpy(take(extent).data(), from.data(), from.size());
  put_back(extent);
  await_disk(extent);
  free_buffers();
}

SliceStore* Extents::slice(at::ScalarType dtype, std::vector<Piece> pieces) {
  std::unique_ptr<Slice>& slice = slices_[{dtype, pieces}];
  if (!slice) slice = std::make_unique<Slice>(*this, dtype, std::move(pieces));
  return slice.get();
}

at::Tensor Extents::memory(int64_t numel, const at::TensorOptions& options) {
  const auto bytes = static_cast<int64_t>(options.dtype().itemsize()) * numel;
  const auto buffer = std::make_shared<DiskBuffer>(bytes);  // shared: a deleter can be copied
  return at::from_blob(
      buffer->data(), {numel}, [buffer](void*) {}, options);
}

}  // namespace trireme
