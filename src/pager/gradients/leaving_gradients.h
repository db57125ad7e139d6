// Reduced gradients of offloaded units on their way to the host, beside the rest of backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <vector>

#include "pager/gradients/mesh_context.h"
#include "trireme/device/stream.h"

namespace trireme {

class LeavingGradients {
 public:
  /// For the offloaded units of a mesh.
  explicit LeavingGradients(const MeshContext& context);
  ~LeavingGradients();
  LeavingGradients(const LeavingGradients&) = delete;
  LeavingGradients& operator=(const LeavingGradients&) = delete;

  /// `reduced` [shard_numel], which the current stream has made, leaves; unless `replaces`, on top of what has left.
  void leave(int unit, at::Tensor reduced, bool replaces);
  /// The host has written what had left.
  void rewritten(int unit);
  /// All that leaves is enqueued.
  void finish();

  const at::Tensor& on_host(int unit) const { return places_[unit].on_host; }
  /// After finish(): of what has left, [] fp64 on the device.
  at::Tensor norm(int unit) const { return norms_.select(0, unit); }
  void await(int unit) const { places_[unit].arrived.synchronize(); }
  bool has_arrived(int unit) const { return places_[unit].arrived.is_complete(); }

 private:
  struct Place {
    at::Tensor on_host;  // [shard_numel], accumulation dtype
    Event arrived;
  };
  /// Memory that the allocator may give to others only when the stream that made it is behind its leaving.
  struct UnderWay {
    at::Tensor memory;
    Event left;
  };

  void measure(int unit, const at::Tensor& gradients);
  void forget_oldest();

  const MeshContext& context_;
  const c10::Device device_;
  Offload& offload_;
  SideStream stream_;
  std::vector<Place> places_;  // by unit
  at::Tensor norms_;           // [units] fp64
  std::deque<UnderWay> under_way_;
};

}  // namespace trireme
