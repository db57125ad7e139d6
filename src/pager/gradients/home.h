// Where the reduced gradients of a mesh's units stand on this rank until the optimizer has used them up: its shard of
// each, at ZeRO stage 0 all of it, of an offloaded unit the host's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "pager/gradients/leaving_gradients.h"
#include "pager/gradients/mesh_context.h"
#include "pager/weights/flat_buffers.h"
#include "trireme/base/exact_sum.h"

namespace trireme {

class GradientHome {
 public:
  explicit GradientHome(const MeshContext& context);

  struct Place {
    at::Tensor shard;       ///< [shard_numel]; undefined: gradients leave for the host at once
    at::Tensor whole = {};  ///< [numel], where this rank has room for all of it; the shard may be a part of it
    // Where there are replicas:
    bool is_closed = false;  ///< the shard holds their sum
    at::Tensor since = {};   ///< [shard_numel], what came afterwards
  };
  Place& at(int unit) { return places_[unit]; }

  enum class Room { kShards, kWholes };
  /// Makes room for all units that stay, with PagerPolicy::register_buffers in memory that `group` has registered, in
  /// which they are reduced. Collective.
  void keep(Room room, Group& group);
  /// For add_to(): gradients between backward and their reduction, and buffers for messages.
  void add_in_flight(int64_t bytes);
  void add_registered(int64_t bytes) { registered_bytes_ += bytes; }

  /// `reduced` [shard_numel], over the ranks of the shards, joins the gradients of `unit`; with `replaces` it is the
  /// first of a window. Collective over the replicas where the unit leaves.
  void put(int unit, const at::Tensor& reduced, bool replaces);
  /// Where the next such gradients of `unit` are added: the shard until close(), from then on, where there are
  /// replicas, a tensor of its own, of zeros at first.
  const at::Tensor& sums(int unit);
  /// The shard becomes the replicas' sum of all that came in this window. Collective over the replicas.
  void close(int unit);
  /// `sums` of this rank's part of `unit` become the replicas' sum: of a shard that is cut its piece, else all of it.
  /// Collective over the replicas.
  void add_up(int unit, const at::Tensor& sums) const;

  /// Whoever has just written this rank's part of `parameter` knows its sum of squares.
  void note_squares(int parameter, double squares) { squares_[parameter] = squares; }
  /// Everything that leaves, of the reductions so far, is enqueued.
  void finish() { leaving_.finish(); }

  /// The owned gradients of `unit`, [numel of OwnedSlice].
  at::Tensor owned(int unit) const;
  /// After finish(): the owned gradients of `parameter` were written by others.
  void rewritten(int parameter);
  /// After finish(): adds the squares of the elements of `parameter`'s gradient that this rank counts. On the host.
  void add_squares(int parameter, ExactSum& sum) const;
  /// After finish(), of an offloaded unit: their norm, [] fp64 on the device; of others undefined.
  at::Tensor norm_on_device(int unit) const { return context_.offload.owns(unit) ? leaving_.norm(unit) : at::Tensor(); }
  /// Offloaded: blocks this thread until they are on the host.
  void await_owned(int unit) const { leaving_.await(unit); }
  bool is_owned_there(int unit) const { return leaving_.has_arrived(unit); }
  /// The window's gradients are used up.
  void clear();
  void add_to(PagerMemory& memory) const;

 private:
  const MeshContext& context_;
  LeavingGradients leaving_;
  FlatBuffers buffers_;
  std::vector<Place> places_;                   // by unit
  std::vector<std::optional<double>> squares_;  // by parameter, of this window; nothing: not known
  int64_t in_flight_bytes_ = 0;
  int64_t peak_in_flight_bytes_ = 0;
  int64_t registered_bytes_ = 0;
};

}  // namespace trireme
