// Gradients that each replica of a mesh has summed over its shards become the sum over all replicas.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "pager/weights/store.h"

namespace trireme {

class ReplicaSums {
 public:
  ReplicaSums(const StoreContext& context, const ShardMesh& mesh)
      : context_(context), mesh_(mesh), units_(are_there() ? context.layout.units.size() : 0) {}

  bool are_there() const { return mesh_.replica_count() > 1; }

  /// `sums` [shard_numel], of this rank's shard, becomes the replicas' sum: its piece where the shard is cut, else all
  /// of it. Collective over the replicas.
  void add_up(int unit, const at::Tensor& sums) const;

  /// Where the next gradients of `unit` are added: `shard` itself until close(), from then on a tensor of its own, of
  /// zeros at first.
  const at::Tensor& open(int unit, const at::Tensor& shard);
  /// `shard` becomes the replicas' sum of all that open() got in this window. Collective over the replicas.
  void close(int unit, const at::Tensor& shard);
  bool is_closed(int unit) const { return units_[unit].is_closed; }
  /// The window's gradients are used up.
  void clear() { units_.assign(units_.size(), {}); }

 private:
  struct Unit {
    bool is_closed = false;  // since then the shard holds the replicas' sum
    at::Tensor since;        // [shard_numel]
  };

  const StoreContext context_;
  const ShardMesh& mesh_;
  std::vector<Unit> units_;
};

}  // namespace trireme
