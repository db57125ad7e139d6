// Where gradients go. One subclass per way of reducing them: one-sided (peers read each other's gradients where they
// were computed) and bucketed (collectives over flat buffers).
#pragma once

#include <ATen/ops/from_blob.h>

#include <memory>
#include <vector>

#include "pager/gradients/gradient_scale.h"
#include "pager/gradients/replica_sums.h"
#include "pager/layout/gradient_dtypes.h"
#include "pager/weights/managed_parameter.h"
#include "pager/weights/store.h"
#include "trireme/base/exact_sum.h"
#include "trireme/device/stream.h"

namespace trireme {

class GradientStore {
 public:
  /// A store for the parameters of mesh number `mesh`.
  GradientStore(const StoreContext& context, int mesh)
      : context_(context),
        mesh_(mesh),
        scale_(context.policy, this->mesh()),
        touched_(context.parameters.size()),
        replica_sums_(context, this->mesh()) {}
  virtual ~GradientStore() = default;
  GradientStore(const GradientStore&) = delete;
  GradientStore& operator=(const GradientStore&) = delete;

  /// A `gradient` of `parameter`, flat in the parameter's memory order, in its dtype or the accumulation dtype.
  virtual void accept(int parameter, at::Tensor gradient) = 0;
  /// Whether gradients are summed on this rank over the whole window, and reduced at its end alone.
  virtual bool reduces_at_boundary() const { return false; }
  /// Where reduces_at_boundary(): what this rank has summed of `parameter` since the last finish(), flat; undefined:
  /// nothing.
  virtual at::Tensor unreduced(int) const { return {}; }
  /// By unit: what the next backward pass reaches; empty: every unit. Until end_backward().
  virtual void expect(const std::vector<bool>&) {}
  /// A backward pass is over. Collective where reductions are.
  virtual void end_backward() = 0;
  /// Completes every reduction of the window so far. Collective. What is accepted afterwards adds to it.
  virtual void finish() = 0;
  /// After finish(): the owned gradients of `parameter` were written by others.
  virtual void rewritten(int) {}
  /// After finish(): adds the squares of the elements of `parameter`'s gradient that this rank counts. On the host.
  virtual void add_squares(int parameter, ExactSum& sum) const = 0;
  /// The owned gradients of `unit`, [numel of OwnedSlice].
  virtual at::Tensor owned(int unit) = 0;
  /// After finish(), of an offloaded unit: their norm, [] fp64 on the device.
  virtual at::Tensor norm_on_device(int) const { return {}; }
  /// Offloaded: blocks this thread until they are on the host.
  virtual void await_owned(int) {}
  virtual bool is_owned_there(int) const { return true; }
  /// The window's gradients are used up.
  virtual void clear() = 0;
  virtual void add_to(PagerMemory& memory) const = 0;
  int64_t reductions() const { return reductions_; }
  int64_t reduced_bytes() const { return reduced_bytes_; }

  void set_accumulation_steps(int64_t steps) { scale_.accumulation_steps = steps; }
  const GradientScale& scale() const { return scale_; }
  /// After finish(): whether some rank produced a gradient of `parameter`.
  bool touched(int parameter) const { return touched_[parameter] != 0; }

 protected:
  const ShardMesh& mesh() const { return context_.meshes[mesh_]; }
  Group& group() const { return mesh().shards; }
  const UnitLayout& unit(int index) const { return context_.layout.units[index]; }
  /// Whether this store has gradients of a unit.
  bool has(int index) const { return unit(index).trainable && unit(index).mesh == mesh_; }
  int position_in_unit(int index) const { return context_.layout.placement_of[index]; }
  int units() const { return static_cast<int>(context_.layout.units.size()); }
  const ManagedParameter& parameter(int index) const { return context_.parameters[index]; }
  int parameters() const { return static_cast<int>(context_.parameters.size()); }
  const PagerPolicy& policy() const { return context_.policy; }
  c10::Device device() const { return context_.device; }
  /// Where nothing is exchanged. (On the host a world of one goes the way of all others.)
  bool is_alone_on_device() const { return !is_host(device()) && group().size() == 1 && mesh().replica_count() == 1; }
  at::ScalarType accumulation_dtype(int index) const { return trireme::accumulation_dtype(unit(index), policy()); }
  int64_t shard_begin(int index) const { return context_.shard_begin(index); }
  at::Tensor piece_of(int index, const at::Tensor& shard) const { return context_.piece_of(index, shard); }
  Overlap in_shard(const ManagedParameter& managed) const {
    return overlap(managed, shard_begin(managed.unit), shard_begin(managed.unit) + unit(managed.unit).shard_numel);
  }
  /// The elements of `managed` whose squares this rank adds to the norm: over all ranks each element once.
  std::vector<Overlap> counted(const ManagedParameter& managed) const {
    const bool is_cut = unit(managed.unit).pieces > 1;
    if (!mesh().counts_in_norm || (!is_cut && mesh().replica() != 0)) return {};
    const int64_t begin = context_.piece_begin(managed.unit);
    return counted_within(managed, overlap(managed, begin, begin + unit(managed.unit).piece_numel()));
  }
  /// A flag of each rank becomes the largest of the mesh. `group` has the ranks of the mesh's shards.
  void agree(std::vector<uint8_t>& flags, Group& group) const {
    const at::Tensor all =
        at::from_blob(flags.data(), {static_cast<int64_t>(flags.size())}, at::TensorOptions().dtype(at::kByte));
    group.all_reduce(all, ReduceOp::kMax).wait();
    if (replica_sums_.are_there()) mesh().replicas->all_reduce(all, ReduceOp::kMax).wait();
  }

 private:
  StoreContext context_;
  const int mesh_;

 protected:
  GradientScale scale_;
  std::vector<uint8_t> touched_;  // by parameter; before finish() by this rank alone
  int64_t reductions_ = 0;
  int64_t reduced_bytes_ = 0;  // what this rank gave to them
  ReplicaSums replica_sums_;
};

std::unique_ptr<GradientStore> make_bucketed_gradients(const StoreContext& context, int mesh);
std::unique_ptr<GradientStore> make_one_sided_gradients(const StoreContext& context, int mesh);

}  // namespace trireme
