#include "pager/buffer_arena.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace trireme {

ArenaBuffer::ArenaBuffer(at::Tensor memory) : memory_(std::move(memory)) {
  if (is_host(memory_)) return;
  owner_ = current_stream(memory_.device());
  free_ = Mark::behind(*owner_);  // the allocator hands out what this stream may still be using
}

void ArenaBuffer::end_write() {
  if (is_host(memory_)) return;
  readers_ = {current_stream(memory_.device())};
  written_ = Mark::behind(readers_.front());
}

void ArenaBuffer::begin_read() {
  if (is_host(memory_)) return;
  const c10::Stream stream = current_stream(memory_.device());
  if (std::find(readers_.begin(), readers_.end(), stream) != readers_.end()) return;
  written_.pass(stream);
  readers_.push_back(stream);
}

void ArenaBuffer::end_use() {
  if (!owner_) return;
  for (const c10::Stream& reader : readers_)
    if (reader != *owner_) Mark::behind(reader).pass(*owner_);
  free_ = Mark::behind(*owner_);
}

ArenaBuffer BufferArena::take(int64_t numel, const at::TensorOptions& options, int64_t room_bytes) {
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
  return ArenaBuffer(at::empty({numel}, options));
}

void BufferArena::keep(ArenaBuffer buffer) {
  buffer.end_use();
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
