#include "pager/gradients/replica_sums.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

namespace trireme {

void ReplicaSums::add_up(int unit, const at::Tensor& sums) const {
  if (!are_there()) return;
  if (context_.unit(unit).pieces == 1) return mesh_.replicas->all_reduce(sums).wait();
  const at::Tensor piece = context_.piece_of(unit, sums);
  const at::Tensor sum = at::empty_like(piece);
  mesh_.replicas->reduce_scatter(sum, sums).wait();
  piece.copy_(sum);
}

const at::Tensor& ReplicaSums::open(int unit, const at::Tensor& shard) {
  if (!are_there() || !units_[unit].is_closed) return shard;
  at::Tensor& since = units_[unit].since;
  if (!since.defined()) since = at::zeros_like(shard);
  return since;
}

void ReplicaSums::close(int unit, const at::Tensor& shard) {
  if (!are_there()) return;
  const at::Tensor& sums = open(unit, shard);
  add_up(unit, sums);
  if (units_[unit].is_closed) shard.add_(sums);
  units_[unit] = {.is_closed = true, .since = {}};
}

}  // namespace trireme
