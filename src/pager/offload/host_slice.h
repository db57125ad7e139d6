// A slice of a unit that is updated on the host, and the copy of it that its device uses.
#pragma once

#include <ATen/core/Tensor.h>

#include "pager/storage/buffer_arena.h"
#include "trireme/device/pinned_arena.h"
#include "trireme/device/stream.h"

namespace trireme {

class HostSlice {
 public:
  HostSlice() = default;  ///< of nothing
  HostSlice(HostSlice&&) = default;
  HostSlice& operator=(HostSlice&&) = default;
  /// The memory of the device's copy may go: who gets it next comes behind what is still on its way there.
  ~HostSlice() { sent_.stream_wait_quietly(); }
  /// A slice with the values that `on_device` has.
  HostSlice(const at::Tensor& on_device, PinnedArena& memory);

  const at::Tensor& on_host() const { return on_host_; }
  /// Work that the current stream enqueues from here on may use the device's copy.
  void begin_use() { on_device_.begin_read(); }
  /// All that uses it is enqueued.
  void end_use() { on_device_.end_use(); }
  /// On `side`: the device's copy becomes the host's, behind its last use. Any thread.
  void send(const SideStream& side);
  /// The device's copy, into which somebody wrote, goes to the host, which waits for that.
  void fetch();
  /// Blocks until the host's memory may be written.
  void await_sent() const { sent_.synchronize(); }
  bool is_sent() const { return sent_.is_complete(); }

 private:
  at::Tensor on_host_;
  ArenaBuffer on_device_;
  Event sent_;
};

}  // namespace trireme
