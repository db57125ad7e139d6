// Where the weights of all units are, and how a touched parameter becomes whole. One subclass per policy:
// resident (ZeRO stages 0-2), mapped (ZeRO stage 3, shared), paged (ZeRO stage 3, copy).
#pragma once

#include <memory>
#include <vector>

#include "pager/offload/offload.h"
#include "pager/weights/managed_parameter.h"
#include "trireme/pager/layout/shard_mesh.h"
#include "trireme/pager/storage/owned_slice.h"
#include "trireme/pager/storage/pager_memory.h"

namespace trireme {

class Extents;

/// The things that every store works on.
struct StoreContext {
  const std::vector<ShardMesh>& meshes;
  const Layout& layout;
  const PagerPolicy& policy;
  std::vector<ManagedParameter>& parameters;
  const c10::Device& device;  ///< of all parameters, and of what is kept for them but for what is offloaded
  Offload& offload;
  const std::unique_ptr<Extents>& extents;  ///< of shards on disk; null: they are in memory

  const UnitLayout& unit(int index) const { return layout.units[index]; }
  const ShardMesh& mesh(int index) const { return meshes[unit(index).mesh]; }
  /// First element of this rank's shard of a unit's flat buffer.
  int64_t shard_begin(int index) const { return unit(index).shard_numel * mesh(index).shards.rank(); }
  /// First element of the piece of that shard whose gradients and optimizer states this rank keeps; the shard itself
  /// where it is not cut.
  int64_t piece_begin(int index) const {
    return shard_begin(index) + (unit(index).pieces > 1 ? unit(index).piece_numel() * mesh(index).replica() : 0);
  }
  /// That piece of `shard` [shard_numel].
  at::Tensor piece_of(int index, const at::Tensor& shard) const {
    return shard.narrow(0, piece_begin(index) - shard_begin(index), unit(index).piece_numel());
  }
};

class WeightStore {
 public:
  explicit WeightStore(const StoreContext& context);
  virtual ~WeightStore();
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;

  virtual void before_access(int parameter, Access access) = 0;
  virtual void after_write(int parameter) = 0;

  /// Makes `parameter` whole until let_go(), whatever else is touched; with `writes`, for bytes that this rank may
  /// write through a pointer. Collective.
  virtual void hold(int parameter, bool writes) { before_access(parameter, writes ? Access::kWrite : Access::kRead); }
  /// No hold is left. Local.
  virtual void let_go(int) noexcept {}

  /// Every rank of every mesh has come this far. Collective.
  void await_peers() const;

  /// Drops what was gathered and is not held.
  virtual void release_gathered() {}

  /// The slice of `unit` that this rank updates, in the authoritative memory.
  virtual OwnedSlice owned(int unit) = 0;
  /// No peer reads any more: brings user writes that are still private into the owned slices.
  virtual void apply_writes() {}
  /// After apply_writes() on every rank: what was private is everybody's.
  virtual void settle_writes() {}
  /// A hash of the values that this rank's program has written into `parameter` since apply_writes(); 0: none. Waits
  /// for a device.
  virtual int64_t written_digest(int index) const;
  /// The owned weights of `unit` are about to change.
  virtual void outdate(int) {}
  /// They are final. Any thread, of an offloaded unit; what peers need of it goes out in open_window().
  virtual void publish(int unit) = 0;
  /// Offloaded: blocks this thread until the owned weights may be written by the host.
  virtual void await_owned(int) {}
  virtual bool is_owned_there(int) const { return true; }
  /// On return every parameter has its new value on every rank, or will be gathered with it.
  virtual void open_window() = 0;

  virtual void add_to(PagerMemory& memory) const = 0;
  virtual void add_to(PagerCounters&) const {}
  /// Whether operators that only read must be seen.
  virtual bool pages() const { return false; }

  const ShardMesh& mesh_of_parameter(int index) const { return mesh(parameter(index).unit); }
  ManagedParameter& parameter(int index) const { return context_.parameters[index]; }

 protected:
  const UnitLayout& unit(int index) const { return context_.unit(index); }
  const ShardMesh& mesh(int index) const { return context_.mesh(index); }
  Group& shards(int index) const { return mesh(index).shards; }
  const std::vector<ShardMesh>& meshes() const { return context_.meshes; }
  const std::vector<int>& leaf_mates(int index) const { return context_.layout.leaf_mates[index]; }
  int units() const { return static_cast<int>(context_.layout.units.size()); }
  std::vector<ManagedParameter>& parameters() const { return context_.parameters; }
  const PagerPolicy& policy() const { return context_.policy; }
  c10::Device device() const { return context_.device; }
  Offload& offload() const { return context_.offload; }
  const StoreContext& context() const { return context_; }
  bool is_written(int index) const;  ///< by the user, since the window opened: some parameter of the unit
  at::TensorOptions options(int index) const { return at::TensorOptions().dtype(unit(index).dtype).device(device()); }

  int64_t shard_begin(int index) const { return context_.shard_begin(index); }
  int64_t piece_begin(int index) const { return context_.piece_begin(index); }
  at::Tensor piece_of(int index, const at::Tensor& shard) const { return context_.piece_of(index, shard); }
  /// New weights in each replica's piece of `shard` become the others'. Collective over the replicas.
  void join_pieces(int index, const at::Tensor& shard) const {
    if (unit(index).pieces > 1) mesh(index).replicas->all_gather(shard, piece_of(index, shard)).wait();
  }

 private:
  StoreContext context_;
};

/// Copies the initial values of `parameter`, which must be whole, to `target` [numel], its place in a flat buffer.
void copy_values(const ManagedParameter& parameter, const at::Tensor& target);

std::unique_ptr<WeightStore> make_resident_weights(const StoreContext& context);
std::unique_ptr<WeightStore> make_mapped_weights(const StoreContext& context);
std::unique_ptr<WeightStore> make_paged_weights(const StoreContext& context);

}  // namespace trireme
