#include "pager/gradient_norm.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>

namespace trireme {

double sum_over_ranks(Group& group, const ExactSum& mine) {
  if (group.size() == 1) return mine.total();
  std::vector<ExactSum> all(group.size());
  constexpr auto kBytes = static_cast<int64_t>(sizeof(ExactSum));
  const at::TensorOptions options = at::TensorOptions().dtype(at::kByte);
  group
      .all_gather(at::from_blob(all.data(), {group.size() * kBytes}, options),
                  at::from_blob(const_cast<ExactSum*>(&mine), {kBytes}, options))
      .wait();
  ExactSum sum;
  for (const ExactSum& part : all) sum.add(part);
  return sum.total();
}

at::Tensor sum_of_squares_on_device(Group& group, const Layout& layout, const std::vector<OwnedSlice>& owned,
                                    std::vector<at::Tensor> norms) {
  std::vector<at::Tensor> shards;
  for (size_t i = 0; i < owned.size(); ++i) {
    if (norms[i].defined()) continue;
    const int64_t numel = layout.units[owned[i].unit].shard_numel;
    const at::Tensor& gradients = owned[i].gradients;
    const bool is_whole = gradients.numel() > numel;
    shards.push_back(is_whole ? gradients.narrow(0, numel * group.rank(), numel) : gradients);
  }
  if (!shards.empty()) {
    const std::vector<at::Tensor> of_shards = at::_foreach_norm(shards, 2, at::kDouble);
    auto measured = of_shards.begin();
    for (at::Tensor& norm : norms)
      if (!norm.defined()) norm = *measured++;
  }
  const at::Tensor squares = at::stack(norms).square();
  if (group.size() == 1) return squares.sum();
  const at::Tensor all = at::empty({group.size() * squares.numel()}, squares.options());
  group.all_gather(all, squares).wait();
  return all.sum();
}

}  // namespace trireme
