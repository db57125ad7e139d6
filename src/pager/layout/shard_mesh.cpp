#include "trireme/pager/layout/shard_mesh.h"

namespace trireme {

void broadcast_over(const ShardMesh& mesh, const at::Tensor& values, int root) {
  if (mesh.shards.size() > 1) mesh.shards.broadcast(values, root).wait();
  if (mesh.replica_count() > 1) mesh.replicas->broadcast(values, 0).wait();
}

void all_reduce_over(const ShardMesh& mesh, const at::Tensor& values, ReduceOp op) {
  if (mesh.shards.size() > 1) mesh.shards.all_reduce(values, op).wait();
  if (mesh.replica_count() > 1) mesh.replicas->all_reduce(values, op).wait();
}

void barrier_over(const ShardMesh& mesh) {
  mesh.shards.barrier();
  if (mesh.replicas != nullptr) mesh.replicas->barrier();
}

}  // namespace trireme
