// The ranks, units and parameters of a mesh, on which the parts of its gradient store work.
#pragma once

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "pager/layout/gradient_dtypes.h"
#include "pager/weights/store.h"
#include "trireme/device/stream.h"

namespace trireme {

struct MeshContext : StoreContext {
  MeshContext(const StoreContext& context, int mesh) : StoreContext(context), number(mesh), ranks(meshes[mesh]) {}

  const int number;
  const ShardMesh& ranks;

  /// Whether `index` is a unit of this mesh that has gradients.
  bool has(int index) const { return unit(index).trainable && unit(index).mesh == number; }
  int units() const { return static_cast<int>(layout.units.size()); }
  bool has_replicas() const { return ranks.replica_count() > 1; }
  /// Where nothing is exchanged. (On the host a world of one goes the way of all others.)
  bool is_alone_on_device() const { return !is_host(device) && ranks.shards.size() == 1 && !has_replicas(); }
  /// This rank's shard of `whole` [numel].
  at::Tensor shard_of(int index, const at::Tensor& whole) const {
    return whole.narrow(0, shard_begin(index), unit(index).shard_numel);
  }
  /// [numel], for gradients of unit `index`.
  at::Tensor zeros(int index, int64_t numel) const {
    return at::zeros({numel}, at::TensorOptions().dtype(accumulation_dtype(unit(index), policy)).device(device));
  }
  /// A flag of each rank becomes the largest of the mesh. `shards` has the ranks of its shards; null: their flags are
  /// the same.
  void agree(std::vector<uint8_t>& flags, Group* shards) const {
    const at::Tensor all =
        at::from_blob(flags.data(), {static_cast<int64_t>(flags.size())}, at::TensorOptions().dtype(at::kByte));
    if (shards != nullptr) shards->all_reduce(all, ReduceOp::kMax).wait();
    if (has_replicas()) ranks.replicas->all_reduce(all, ReduceOp::kMax).wait();
  }
};

}  // namespace trireme
