#include "pager/storage/buffer_arena.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "pager/storage/slab.h"

namespace trireme {

ArenaBuffer::ArenaBuffer(at::Tensor memory) : memory_(std::move(memory)) {
  if (is_host(memory_)) return;
  owner_ = current_stream(memory_.device());
  free_ = Event::record(*owner_);  // the allocator hands out what this stream may still be using
}

ArenaBuffer::ArenaBuffer(at::Tensor memory, Event used)
    : memory_(std::move(memory)), free_(std::move(used)), owner_(current_stream(memory_.device())) {}

void ArenaBuffer::end_write() {
  if (is_host(memory_)) return;
  readers_ = {current_stream(memory_.device())};
  written_ = Event::record(readers_.front());
}

void ArenaBuffer::begin_read() {
  if (is_host(memory_)) return;
  const c10::Stream stream = current_stream(memory_.device());
  if (std::find(readers_.begin(), readers_.end(), stream) != readers_.end()) return;
  written_.stream_wait(stream);
  readers_.push_back(stream);
}

void ArenaBuffer::end_use() {
  if (!owner_) return;
  if (readers_.empty()) free_.stream_wait(*owner_);  // nobody came to write it
  for (const c10::Stream& reader : readers_)
    if (reader != *owner_) Event::record(reader).stream_wait(*owner_);
  free_ = Event::record(*owner_);
}

BufferArena::BufferArena(at::Tensor slab) : slab_(std::move(slab)) {
  const c10::Stream stream = current_stream(slab_.device());
  rooms_.push_back({0, slab_.numel(), stream, Event::record(stream)});
}

std::optional<ArenaBuffer> BufferArena::cut(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = bytes_in_slab(numel, dtype);
  // The smallest that serves, to keep large ones for large units.
  auto best = rooms_.end();
  for (auto room = rooms_.begin(); room != rooms_.end(); ++room)
    if (room->bytes() >= bytes && (best == rooms_.end() || room->bytes() < best->bytes())) best = room;
  if (best == rooms_.end()) return std::nullopt;
  // Large ones grow from the front and small ones from the back, so that what is left in between stays in one piece.
  const bool is_large = bytes >= slab_.numel() / 4;
  const int64_t begin = is_large ? best->begin : best->end - bytes;
  ArenaBuffer buffer(buffer_in_slab(slab_, begin, numel, dtype), best->free);
  (is_large ? best->begin : best->end) = is_large ? begin + bytes : begin;
  if (best->bytes() == 0) rooms_.erase(best);
  return buffer;
}

void BufferArena::give_back(const ArenaBuffer& buffer) {
  const int64_t begin = buffer.memory_.storage_offset() * buffer.memory_.element_size();
  const c10::Stream owner = *buffer.owner_;
  Room room{begin, begin + bytes_in_slab(buffer.memory_.numel(), buffer.memory_.scalar_type()), owner, buffer.free_};
  const auto joins = [&](const Room& other) {
    if (other.end != room.begin && other.begin != room.end) return false;
    room.begin = std::min(room.begin, other.begin);
    room.end = std::max(room.end, other.end);
    if (other.owner == owner) return true;  // its use ended before
    other.free.stream_wait(owner);
    room.free = Event::record(owner);
    return true;
  };
  std::erase_if(rooms_, joins);
  const auto behind = [&](const Room& other) { return other.begin > room.begin; };
  rooms_.insert(std::find_if(rooms_.begin(), rooms_.end(), behind), std::move(room));
}

ArenaBuffer BufferArena::take(int64_t numel, const at::TensorOptions& options, int64_t room_bytes) {
  if (slab_.defined()) {
    if (auto buffer = cut(numel, c10::typeMetaToScalarType(options.dtype()))) return *std::move(buffer);
    return ArenaBuffer(at::empty({numel}, options));
  }
  const auto fits = [&](const ArenaBuffer& buffer) {
    return buffer.memory_.numel() == numel && buffer.memory_.dtype() == options.dtype();
  };
  const auto found = std::find_if(idle_.begin(), idle_.end(), fits);
  if (found != idle_.end()) {
    ArenaBuffer buffer = std::move(*found);
    idle_.erase(found);
    idle_bytes_ -= static_cast<int64_t>(buffer.memory_.nbytes());
    return buffer;
  }
  trim(room_bytes - numel * static_cast<int64_t>(options.dtype().itemsize()));
  return ArenaBuffer(source_ ? source_(numel, options) : at::empty({numel}, options));
}

void BufferArena::keep(ArenaBuffer buffer) {
  buffer.end_use();
  if (slab_.defined()) {
    if (buffer.memory_.is_alias_of(slab_)) give_back(buffer);
    return;
  }
  idle_bytes_ += static_cast<int64_t>(buffer.memory_.nbytes());
  idle_.push_back(std::move(buffer));
}

void BufferArena::trim(int64_t bytes) {
  while (!idle_.empty() && idle_bytes_ > bytes) {
    idle_bytes_ -= static_cast<int64_t>(idle_.front().memory_.nbytes());
    idle_.erase(idle_.begin());
  }
}

}  // namespace trireme
