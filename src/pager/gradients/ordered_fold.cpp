#include "pager/gradients/ordered_fold.h"

#include <algorithm>

#include "pager/storage/kernels.h"
#include "pager/weights/managed_parameter.h"
#include "trireme/device/stream.h"

namespace trireme {

namespace {

constexpr int64_t kFoldedAtOnce = int64_t{1} << 14;  // elements that stay in the cache while all ranks' are added

}  // namespace

void fold_in_order(const at::Tensor& shard, const at::Tensor& received, bool replaces) {
  const int64_t numel = shard.numel();
  const int64_t ranks = numel > 0 ? received.numel() / numel : 0;
  if (!is_host(shard)) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const at::Tensor part = received.narrow(0, rank * numel, numel);
      replaces&& rank == 0 ? shard.copy_(part) : shard.add_(part);
    }
    return;
  }
  for (int64_t begin = 0; begin < numel; begin += kFoldedAtOnce)
    for (int64_t rank = 0; rank < ranks; ++rank) {
      ReduceTask task;
      task.sources = {element(received.data_ptr(), rank * numel + begin, received.element_size())};
      task.source_dtype = received.scalar_type();
      task.target = element(shard.data_ptr(), begin, shard.element_size());
      task.target_dtype = shard.scalar_type();
      task.numel = std::min(kFoldedAtOnce, numel - begin);
      task.accumulate = !replaces || rank > 0;
      reduce(task);
    }
}

}  // namespace trireme
