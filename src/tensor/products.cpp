// What a row does not say: sums by pieces, heads that ranks share in attention, cross entropy.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "tensor/class_loss.h"
#include "tensor/tensor_pass.h"
#include "trireme/base/error.h"

namespace trireme::tensor {

namespace {

enum : size_t { kQuery, kKey, kValue, kEnableGqa = 7 };

const CutArgument* find_in(const CutArguments& found, size_t index) {
  const auto known =
      std::find_if(found.begin(), found.end(), [&](const CutArgument& one) { return one.index == index; });
  return known != found.end() ? &*known : nullptr;
}

}  // namespace

/// The sum of the ranks' products, of so many rows at a time.
at::Tensor TensorPass::sum_by_pieces(const at::Tensor& left, const at::Tensor& right, bool is_weight, int64_t rows,
                                     const OperatorCall& call) {
  const auto device = left.device().type();
  // Factors get their dtype where autograd sees it; autocast keeps the copies of weights, with their gradients.
  const auto cast = [&](const at::Tensor& factor) {
    if (!at::autocast::is_autocast_enabled(device)) return factor;
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), factor, device);
  };
  std::vector<int64_t> sizes = left.sizes().vec();
  sizes.back() = right.size(is_weight ? 0 : 1);
  const at::Tensor product =
      exchanges_->sum_product(cast(left).reshape({-1, left.size(-1)}), cast(right), is_weight, rows, name_of(call));
  return product.view(sizes);
}

// --- attention ---

/// The heads of keys or values that this rank's queries attend with, one for each query head.
at::Tensor TensorPass::heads_by_query(const OperatorCall& call, const at::Tensor& keys, const CutArgument* known,
                                      const CutArgument& query) {
  const int64_t dim = keys.dim() - query.from_right();
  const int64_t heads = known != nullptr ? known->cut.whole() : keys.size(dim);
  const int64_t group = query.cut.whole() / heads;
  if (query.cut.outer != 1 || query.cut.whole() % heads != 0 || (known != nullptr && known->cut.outer != 1))
    refuse(call, query.tensor, str("attends with ", keys.sizes(), ", whose heads do not fit a part"),
           "let heads be a dim of their own");
  const CutArgument whole_keys{.index = 0, .tensor = keys, .cut = known != nullptr ? known->cut : Cut{}};
  // Whether every rank has the heads that it needs is the same on all ranks.
  bool has_all = known != nullptr;
  for (int rank = 0; has_all && rank < group_.size(); ++rank)
    for (const Interval& part : query.cut.ranges->of_rank(rank))
      for (int64_t head = part.begin; has_all && head < part.end; ++head)
        has_all = known->cut.ranges->find(rank, head / group).has_value();
  const at::Tensor all = known == nullptr ? enter(keys) : has_all ? keys : enter(whole(whole_keys));
  std::vector<int64_t> places;
  for (const Interval& part : query.cut.ranges->of_rank(group_.rank()))
    for (int64_t head = part.begin; head < part.end; ++head)
      places.push_back(has_all ? *known->cut.ranges->find(group_.rank(), head / group) : head / group);
  return all.index_select(dim, at::tensor(places, at::TensorOptions().dtype(at::kLong).device(keys.device())));
}

/// Keys and values get the heads of this rank's queries where ranks share some; false: they do not fit.
bool TensorPass::fit_heads(OperatorCall& call, Next next, CutArguments& found) {
  const CutArgument* const known_query = find_in(found, kQuery);
  if (known_query == nullptr || known_query->from_right() != 3) return true;
  const CutArgument query = *known_query;
  const auto is_fit = [&](size_t index) {
    const at::Tensor keys = call.arguments()[index].toTensor();
    const CutArgument* const known = find_in(found, index);
    if (known != nullptr && known->from_right() != query.from_right()) return true;
    if (keys.dim() < 3) return true;
    const int64_t heads = known != nullptr ? known->cut.whole() : keys.size(-3);
    if (heads == query.cut.whole()) return true;
    return known != nullptr && known->cut.ranges->times(query.cut.whole() / heads) == *query.cut.ranges;
  };
  const bool keys_fit = is_fit(kKey), values_fit = is_fit(kValue);
  if (keys_fit || values_fit) return keys_fit && values_fit;
  for (const size_t index : {kKey, kValue}) {
    const CutArgument* const known = find_in(found, index);
    const at::Tensor keys = call.arguments()[index].toTensor();
    const at::Tensor own = next.run(call, [&] { return heads_by_query(call, keys, known, query); });
    std::erase_if(found, [index](const CutArgument& one) { return one.index == index; });
    found.push_back({index, own, cut_along(query.cut, own.dim() - query.from_right())});
    std::ranges::sort(found, {}, &CutArgument::index);
    argument(call, index) = own;
  }
  argument(call, kEnableGqa) = false;
  return true;
}

/// Logits of which each rank has the columns of some classes stay so. Means leave ignored targets out.
void TensorPass::run_class_loss(OperatorCall& call, Next next, const CutArguments& found) {
  const CutArgument one = found[0];
  const bool is_entropy = call.op.schema().name() == "aten::cross_entropy_loss";
  if (!is_entropy || found.size() > 1 || one.index != 0 || one.tensor.dim() != 2 || one.cut.dim != 1 ||
      one.cut.outer != 1 || one.cut.ranges->overlaps() || call.arguments()[2].isTensor())
    return run_whole(call, next, found);
  const at::Tensor targets = call.arguments()[1].toTensor();
  if (!at::isIntegralType(targets.scalar_type(), /*includeBool=*/false)) return run_whole(call, next, found);
  const int64_t reduction = call.arguments()[3].toInt();
  const c10::SymInt ignored_index = call.arguments()[4].toSymInt();
  const int64_t ignored = ignored_index.guard_int(__FILE__, __LINE__);
  const double smoothing = call.arguments()[5].toDouble();
  const at::Tensor result = next.run(call, [&] {
    const at::Tensor is_ignored = targets.eq(ignored);
    const at::Tensor is_class = targets.ge(0).logical_and(targets.lt(one.cut.ranges->whole())).logical_or(is_ignored);
    if (is_class.is_cpu() && !is_class.all().item<bool>())
      throw ShapeError(str("aten::cross_entropy_loss: a target is none of ", one.cut.ranges->whole(), " classes, nor ",
                           ignored, ", which is ignored"));
    const bool widens = at::autocast::is_autocast_enabled(one.tensor.device().type());  // as autocast has losses
    const at::Tensor logits = widens ? one.tensor.to(at::kFloat) : one.tensor;
    const at::Tensor losses = cross_entropy(logits, targets, one.cut, ignored, smoothing, exchanges_);
    if (reduction == at::Reduction::None) return losses;
    const at::Tensor sum = losses.sum();
    return reduction == at::Reduction::Sum ? sum : sum / is_ignored.logical_not().sum().to(sum.scalar_type());
  });
  give(call, {result});
}

}  // namespace trireme::tensor
