#include "sequence/token_policy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <utility>

#include "sequence/attention.h"
#include "trireme/base/error.h"
#include "trireme/recompute/tiled.h"

namespace trireme::sequence {
namespace {

enum : size_t { kLogits, kTarget, kClassWeight, kReduction, kIgnoreIndex };

const PlacedArgument* find_in(const PlacedArguments& found, size_t index) {
  const auto known = std::ranges::find(found, index, &PlacedArgument::index);
  return known != found.end() ? &*known : nullptr;
}

/// Whether each rank has some tokens, and these stand behind one another.
bool is_in_order(const Cut& cut) {
  int64_t at = 0;
  for (int rank = 0; rank < cut.ranges->ranks(); ++rank) {
    const std::vector<Interval>& own = cut.ranges->of_rank(rank);
    if (own.size() != 1 || own[0].begin != at) return false;
    at = own[0].end;
  }
  return cut.outer == 1 && at == cut.ranges->whole();
}

}  // namespace

std::string TokenPolicy::fix_for_unknown(const c10::OperatorHandle& op) const {
  if (op.schema().name().find("attention") != std::string::npos)  // not "scatter"
    return "attention goes over the ranks as scaled_dot_product_attention (attn_implementation=\"sdpa\")";
  return "write it by operators of docs/operators.md: torch.where() in place of writes at places";
}

const Cut* TokenPolicy::cut_of(const AxisPass& pass, const PlacedArguments& found, size_t index) const {
  const PlacedArgument* const one = find_in(found, index);
  return one != nullptr ? pass.cut_of(*one->known, axis_) : nullptr;
}

bool TokenPolicy::run(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) {
  const OperatorRule* const rule = rules_(call.op);
  if (rule == nullptr) return false;
  if (rule->role == OperatorRole::kAttention) return run_attention(pass, call, next, found);
  return rule->role == OperatorRole::kClassLoss && run_class_loss(pass, call, next, found);
}

// --- attention ---

/// Queries that every rank has, of keys that are cut: from here on each rank has its tokens of them.
bool TokenPolicy::take_queries(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) {
  const at::Tensor whole = call.arguments()[kQuery].toTensor();
  const int64_t dim = whole.dim() - 2, ranks = pass.grid().ranks(axis_);
  if (find_in(found, kQuery) != nullptr || dim < 0 || whole.size(dim) < ranks) return false;
  const Cut cut{.axis = axis_,
                .dim = dim,
                .ranges = std::make_shared<const Ranges>(Ranges::even(whole.size(dim), static_cast<int>(ranks)))};
  const at::Tensor own =
      next.run(call, [&] { return slice_of(pass.enter(whole, axis_), cut, pass.group(axis_).rank()); });
  found.insert(found.begin(), {kQuery, own, std::make_shared<const PlacedTensor>(pass.with_cut({}, cut))});
  argument(call, kQuery) = own;
  return true;
}

/// Where queries and keys are cut by tokens; false: the row says what each rank computes.
bool TokenPolicy::run_attention(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) {
  const auto tensor_of = [&](size_t index) { return call.arguments()[index].toTensor(); };
  const auto is_by_tokens = [&](size_t index) {
    const Cut* const cut = cut_of(pass, found, index);
    return cut != nullptr && cut->dim == tensor_of(index).dim() - 2;
  };
  const int64_t dims = tensor_of(kQuery).dim();
  if ((dims != 3 && dims != 4) || !is_by_tokens(kKey) || !is_by_tokens(kValue)) return false;
  if (cut_of(pass, found, kMask) != nullptr) return false;
  if (!is_by_tokens(kQuery) && !take_queries(pass, call, next, found)) return false;
  const at::Tensor query = tensor_of(kQuery), key = tensor_of(kKey), value = tensor_of(kValue);
  const int64_t heads_at = dims - 3;
  const bool is_grouped = call.arguments()[kEnableGqa].toBool();
  // Over other axes each rank attends with heads of its own.
  for (const size_t index : {kQuery, kKey, kValue})
    for (const Cut& cut : find_in(found, index)->known->placement->at(pass.position()))
      if (cut.axis != axis_ && cut.dim > heads_at)
        pass.refuse(
            call, query, "attends by features of which each rank has some",
            "give each rank whole heads of keys: a number of heads that the ranks divide, or key weights that stay "
            "whole");
  if (key.dim() != dims || value.dim() != dims || key.size(heads_at) != value.size(heads_at) ||
      key.size(-1) != query.size(-1) ||
      (dims == 4 && (key.size(0) != query.size(0) || value.size(0) != query.size(0))) ||
      (key.size(heads_at) != query.size(heads_at) && key.size(heads_at) != 1 &&
       (!is_grouped || query.size(heads_at) % key.size(heads_at) != 0)))
    pass.refuse(call, query, str("broadcasts keys ", key.sizes(), " and values ", value.sizes(), " over queries"),
                "expand() them to one batch and as many heads; enable_gqa=True repeats heads of keys");
  const Cut queries = *cut_of(pass, found, kQuery), keys = *cut_of(pass, found, kKey);
  if (!is_in_order(queries) || !is_in_order(keys) || !keys.has_same_ranges(*cut_of(pass, found, kValue))) return false;
  const auto placement = find_in(found, kQuery)->known->placement;
  const c10::IValue given = call.arguments()[kMask];
  const at::Tensor mask = given.isTensor() ? given.toTensor() : at::Tensor();
  if (call.arguments()[kDropout].toDouble() > 0) call.stream = stream_of(placement->at(pass.position()));
  if (attention_ == SequenceAttention::kRing)
    run_in_ring(call, next, queries, keys, mask, pass.exchanges(axis_));
  else
    run_by_heads(call, next, queries, keys, mask, pass.exchanges(axis_));
  call.stack.back() = pass.as_part(call.stack.back().toTensor(), placement);
  return true;
}

// --- losses over classes ---

/// The targets of this rank's samples, which `cut` cuts.
at::Tensor TokenPolicy::own_target(AxisPass& pass, const OperatorCall& call, const PlacedArguments& found,
                                   const Cut& cut) {
  const at::Tensor target = call.arguments()[kTarget].toTensor();
  const PlacedArgument* const known = find_in(found, kTarget);
  const Cut* const own = cut_of(pass, found, kTarget);
  if (own != nullptr && *own == cut) return target;
  if (own != nullptr && target.is_floating_point())
    pass.refuse(call, target, "joins logits with targets of other tokens", "shift both alike");
  const at::Tensor whole = known != nullptr ? pass.whole(*known) : target;
  if (cut.dim < 0 || cut.dim >= whole.dim() || whole.size(cut.dim) != cut.whole())
    pass.refuse(call, call.arguments()[kLogits].toTensor(),
                str("joins logits of ", cut.whole(), " samples with targets ", whole.sizes()),
                "give a target for each");
  return slice_of(whole, cut, pass.group(axis_).rank());
}

/// Logits [N, C] or [N, C, …] of which each rank has some samples; targets without C, or with it where they are
/// probabilities. A mean is over all ranks' targets.
bool TokenPolicy::run_class_loss(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) {
  const at::Tensor logits = call.arguments()[kLogits].toTensor();
  const Cut* const given = cut_of(pass, found, kLogits);
  const int64_t class_dim = logits.dim() > 1 ? 1 : 0;
  if (given == nullptr || given->dim == class_dim) return false;
  const Cut cut = *given;
  const bool is_soft =
      call.arguments()[kTarget].toTensor().is_floating_point() && call.op.schema().name() == "aten::cross_entropy_loss";
  Cut of_target = cut;
  of_target.dim -= !is_soft && cut.dim > class_dim;
  const int64_t reduction = call.arguments()[kReduction].toInt(), ignore_index = call.arguments()[kIgnoreIndex].toInt();
  const c10::IValue weight = call.arguments()[kClassWeight];
  const at::Tensor class_weight = weight.isTensor() ? weight.toTensor() : at::Tensor();
  const at::Tensor target = next.run(call, [&] { return own_target(pass, call, found, of_target); });
  argument(call, kTarget) = target;
  std::erase_if(found, [](const PlacedArgument& one) { return one.index == kTarget; });
  if (reduction == at::Reduction::None) {
    pass.run_over_others(axis_, call, next, found);
    Cut of_result = cut;
    of_result.dim -= cut.dim > class_dim;
    call.stack.back() = pass.as_part(call.stack.back().toTensor(), pass.with_cut({}, of_result).placement);
    return true;
  }
  argument(call, kReduction) = int64_t{at::Reduction::Sum};
  pass.run_over_others(axis_, call, next, found);
  const at::Tensor sum = call.stack.back().toTensor();
  call.stack.back() = next.run(call, [&]() -> at::Tensor {
    AxisExchanges& axis = pass.exchanges(axis_);
    const at::TensorOptions number = sum.options().dtype(at::kDouble).requires_grad(false);
    const std::string& name = call.op.schema().name();
    if (reduction == at::Reduction::Sum) return axis.sum(sum.to(at::kDouble), name).to(sum.scalar_type());
    const at::Tensor count = is_soft ? at::full({1}, logits.numel() / logits.size(class_dim), number)
                                     : loss_weight(target, class_weight, ignore_index);
    const at::Tensor both = axis.sum(at::cat({sum.to(at::kDouble).view({1}), count.to(at::kDouble).view({1})}), name);
    return (both[0] / both[1]).to(sum.scalar_type());
  });
  return true;
}

}  // namespace trireme::sequence
