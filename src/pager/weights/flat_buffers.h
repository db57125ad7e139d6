// Flat buffers that collectives move over and over; with PagerPolicy::register_buffers cut from few allocations that
// the group has registered.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "pager/storage/slab.h"
#include "pager/weights/store.h"

namespace trireme {

/// Whether `context`'s policy asks for it, and all parameters are of one mesh, whose group has peers and does.
bool registers_buffers(const StoreContext& context);

/// Buffers that are there as long as a store is.
class FlatBuffers {
 public:
  explicit FlatBuffers(c10::Device device) : device_(device) {}
  /// As above, or one allocation that the mesh's group has registered, of `bytes`: the sum of bytes_in_slab() of all.
  /// Collective.
  FlatBuffers(const StoreContext& context, int64_t bytes)
      : FlatBuffers(context, bytes, context.meshes.front().shards) {}
  /// The same in another group of the same ranks.
  FlatBuffers(const StoreContext& context, int64_t bytes, Group& group);
  at::Tensor zeros(int64_t numel, at::ScalarType dtype);
  int64_t registered_bytes() const { return slab_.defined() ? slab_.numel() : 0; }

 private:
  c10::Device device_;
  at::Tensor slab_;  // undefined: each buffer is an allocation of its own
  int64_t used_bytes_ = 0;
};

/// Weights to be sent stand in one of two registered buffers, by turns: the collective before the last one must be
/// over on the current stream.
class AlternatingBuffers {
 public:
  AlternatingBuffers() = default;  ///< there are none
  /// Each of `bytes`. Collective.
  AlternatingBuffers(Group& group, c10::Device device, int64_t bytes);
  bool are_there() const { return slab_.defined(); }
  at::Tensor next(int64_t numel, at::ScalarType dtype);
  int64_t registered_bytes() const { return 2 * bytes_; }

 private:
  at::Tensor slab_;
  int64_t bytes_ = 0;
  int turn_ = 0;
};

}  // namespace trireme
