// Buffers of gathered units that come and go: one that is idle is used again for the next unit of its size, so that
// long runs neither fragment memory nor ask the allocator.
//
// On a device a buffer changes hands by events, and the host never waits: who takes one writes behind its last use, and
// every stream that reads it does so behind the writing.
//
// Where buffers are to be registered with the group (PagerPolicy::register_buffers) they are cut from one slab. Who
// takes the same sizes in the same order has them at the same places, on every rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "trireme/device/stream.h"

namespace trireme {

class ArenaBuffer {
 public:
  ArenaBuffer() = default;  ///< no memory
  explicit ArenaBuffer(at::Tensor memory);
  /// Memory whose last use is before `used`.
  ArenaBuffer(at::Tensor memory, Event used);

  const at::Tensor& memory() const { return memory_; }
  /// The current stream may write it from here on.
  void begin_write() const { free_.stream_wait(); }
  /// The current stream has written it.
  void end_write();
  /// The current stream may read it from here on.
  void begin_read();
  /// All that uses it is enqueued: what is written next comes behind that.
  void end_use();

 private:
  friend class BufferArena;
  at::Tensor memory_;
  Event free_;  // behind its last use
  Event written_;
  std::vector<c10::Stream> readers_;  // since it was written; none on the host
  std::optional<c10::Stream> owner_;  // whose order the allocator follows; nothing on the host
};

class BufferArena {
 public:
  BufferArena() = default;
  /// From `slab` [bytes] as long as it has room in one piece. Nothing is idle then: what is not from there is freed.
  explicit BufferArena(at::Tensor slab);
  /// From `source` in place of the allocator: [numel] of `options`.
  using Source = std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)>;
  explicit BufferArena(Source source) : source_(std::move(source)) {}

  /// [numel] of `options`, idle or new; afterwards idle ones and this one have no more than `room_bytes`, if possible.
  ArenaBuffer take(int64_t numel, const at::TensorOptions& options, int64_t room_bytes);
  /// `buffer`, whose use is enqueued.
  void keep(ArenaBuffer buffer);
  /// Frees idle buffers, oldest first, until no more than `bytes` of them are left.
  void trim(int64_t bytes);
  int64_t slab_bytes() const { return slab_.defined() ? slab_.numel() : 0; }

 private:
  /// Bytes [begin, end) of the slab that nobody has.
  struct Room {
    int64_t begin;
    int64_t end;
    c10::Stream owner;  // of what was there last
    Event free;         // behind the last use of all of it, on the owner
    int64_t bytes() const { return end - begin; }
  };
  std::optional<ArenaBuffer> cut(int64_t numel, at::ScalarType dtype);
  void give_back(const ArenaBuffer& buffer);

  Source source_;  // empty: libtorch's allocator
  std::vector<ArenaBuffer> idle_;
  int64_t idle_bytes_ = 0;
  at::Tensor slab_;
  std::vector<Room> rooms_;  // in their order, none beside another
};

}  // namespace trireme
