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

#include "tensor/exchanges.h"
#include "tensor/tensor_pass.h"
#include "trireme/base/error.h"

namespace trireme::tensor {

namespace {

enum : size_t { kQuery, kKey, kValue, kMask, kDropout, kIsCausal, kScale, kEnableGqa };

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
      summed_product(cast(left).reshape({-1, left.size(-1)}), cast(right), is_weight, rows, exchanges_, name_of(call));
  return product.view(sizes);
}

// --- attention ---

/// The heads of keys or values that this rank's queries attend with; `is_by_query`: one for each query head.
at::Tensor TensorPass::heads_for(const OperatorCall& call, const at::Tensor& keys, const CutArgument* known,
                                 const CutArgument& query, bool& is_by_query) {
  is_by_query = true;
  const int64_t place = query.from_right();
  if (keys.dim() < place) return enter(keys);
  const int64_t dim = keys.dim() - place;
  const int64_t heads = known != nullptr ? known->cut.whole() : keys.size(dim);
  if (heads == 1 && known == nullptr && query.cut.whole() != 1 && place != 3) return enter(keys);
  if (heads == query.cut.whole())
    return known != nullptr ? recut(*known, cut_along(query.cut, dim)) : take(keys, cut_along(query.cut, dim));
  const int64_t group = query.cut.whole() / heads;
  if (query.cut.outer != 1 || query.cut.whole() % heads != 0 || (known != nullptr && known->cut.outer != 1))
    refuse(call, query.tensor, str("attends with ", keys.sizes(), ", whose heads do not fit a part"),
           "let heads be a dim of their own");
  if (known != nullptr && known->cut.ranges->times(group) == *query.cut.ranges) {
    is_by_query = false;
    return keys;
  }
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

void TensorPass::run_attention(OperatorCall& call, Next next, const CutArguments& found) {
  const CutArgument* const query = find_in(found, kQuery);
  if (query == nullptr || query->from_right() < 3) return run_whole(call, next, found);
  const int64_t place = query->from_right();
  for (const CutArgument& one : found)
    if (one.from_right() != place) return run_whole(call, next, found);
  bool key_by_query = true, value_by_query = true;
  const CutArgument lead = *query;
  const at::Tensor key = call.arguments()[kKey].toTensor(), value = call.arguments()[kValue].toTensor();
  at::Tensor keys, values;
  next.run(call, [&] {
    keys = heads_for(call, key, find_in(found, kKey), lead, key_by_query);
    values = heads_for(call, value, find_in(found, kValue), lead, value_by_query);
  });
  if (key_by_query != value_by_query) return run_whole(call, next, found);
  argument(call, kKey) = keys;
  argument(call, kValue) = values;
  if (key_by_query) argument(call, kEnableGqa) = false;
  if (call.arguments()[kMask].isTensor() && call.arguments()[kMask].toTensor().defined()) {
    const at::Tensor mask = call.arguments()[kMask].toTensor();
    const CutArgument* const known = find_in(found, kMask);
    replace(call, next, kMask, [&] {
      return known != nullptr ? recut(*known, cut_along(lead.cut, known->cut.dim)) : beside(call, mask, place, lead);
    });
  }
  if (call.arguments()[kDropout].toDouble() > 0) call.stream = RandomStream::kSlice;
  next(call);
  add_results(call, lead.cut, [&](const at::Tensor&) { return lead.cut.dim; });
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
