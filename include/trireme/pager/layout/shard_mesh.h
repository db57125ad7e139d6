// Which ranks share a set of parameters, and how.
#pragma once

#include "trireme/comm/group.h"
#include "trireme/pager/layout/layout.h"

namespace trireme {

/// The ranks that hold a set of parameters. ZeRO over all ranks is one mesh whose shards are all of them; hybrid
/// sharding (HSDP, MiCS) has replicas beside; ZeRO++'s hpZ cuts gradients and optimizer states further, over the
/// replicas; a layer norm under Megatron's sequence parallelism, which every tensor rank holds whole, has the tensor
/// ranks as replicas.
struct ShardMesh {
  /// Each of these ranks keeps one shard of every unit's weights (ZeRO stage 3), gradients and states.
  Group& shards;
  /// Ranks that keep the same shards as this one; null: there are none. With it, gradients are summed over `shards` and
  /// then over these.
  Group* replicas = nullptr;
  /// Each replica keeps only a piece of a shard's gradients, masters and optimizer states. Weights stay shards.
  bool states_over_replicas = false;
  /// Under ReduceOp::kMean gradients are divided by this; 0: by the number of ranks in the mesh.
  int64_t mean_over = 0;
  /// False: another mesh holds the same parameters, and the norm of gradients counts them there.
  bool counts_in_norm = true;

  int replica() const { return replicas != nullptr ? replicas->rank() : 0; }
  int replica_count() const { return replicas != nullptr ? replicas->size() : 1; }
  int64_t divisor() const { return mean_over != 0 ? mean_over : static_cast<int64_t>(shards.size()) * replica_count(); }
  MeshSize size() const { return {.shards = shards.size(), .pieces = states_over_replicas ? replica_count() : 1}; }
};

/// Broadcasts the values of rank `root` of the first replica to all ranks of the mesh. Collective over the mesh.
void broadcast_over(const ShardMesh& mesh, const at::Tensor& values, int root = 0);
/// Reduces `values` in place over all ranks of the mesh. Collective over the mesh.
void all_reduce_over(const ShardMesh& mesh, const at::Tensor& values, ReduceOp op);
/// Returns when all ranks of the mesh have called it.
void barrier_over(const ShardMesh& mesh);

}  // namespace trireme
