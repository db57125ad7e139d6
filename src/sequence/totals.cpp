// Sums, means and losses over all tokens.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "sequence/token_pass.h"
#include "trireme/base/error.h"
#include "trireme/recompute/tiled.h"

namespace trireme::sequence {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A group as a backward pass keeps it.
struct KeptGroup final : torch::CustomClassHolder {
  explicit KeptGroup(Group& group) : group(group) {}
  at::Tensor added(const at::Tensor& part) const {
    at::Tensor sum = part.clone(at::MemoryFormat::Contiguous);
    group.all_reduce(sum).wait();
    return sum;
  }
  Group& group;
};
using GroupPointer = c10::intrusive_ptr<KeptGroup>;

/// The sum over the ranks of a group, on every rank. Each rank's result depends on each rank's part, so the gradient of
/// a part is the sum of the results' gradients.
struct AddOverRanks : torch::autograd::Function<AddOverRanks> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& part, const GroupPointer& group) {
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    return group->added(part);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto group = c10::static_intrusive_pointer_cast<KeptGroup>(context->saved_data["group"].toCapsule());
    return {group->added(gradients[0]), {}};
  }
};

size_t index_of(const OperatorCall& call, const char* name) {
  return static_cast<size_t>(*call.op.schema().argumentIndexWithName(name));
}

}  // namespace

at::Tensor TokenPass::total(const at::Tensor& parts) {
  return AddOverRanks::apply(parts, c10::make_intrusive<KeptGroup>(group_));
}

at::Tensor TokenPass::total_sum(const at::Tensor& sum) {
  if (at::isIntegralType(sum.scalar_type(), /*includeBool=*/true))
    return total(sum.to(at::kLong)).to(sum.scalar_type());
  return total(sum.to(at::kDouble)).to(sum.scalar_type());
}

/// `sum` [any] over `count` [1] elements each, both of this rank.
at::Tensor TokenPass::total_mean(const at::Tensor& sum, const at::Tensor& count) {
  const at::Tensor both = total(at::cat({sum.to(at::kDouble).flatten(), count.to(at::kDouble).flatten()}));
  return (both.narrow(0, 0, sum.numel()) / both.narrow(0, sum.numel(), 1)).view(sum.sizes()).to(sum.scalar_type());
}

/// The numbers of elements that a program may have counted: products of sizes of `argument` with that of its tokens, on
/// any rank.
std::shared_ptr<const std::vector<double>> TokenPass::counts_of(const Found& argument) {
  auto counts = std::make_shared<std::vector<double>>();
  std::vector<double> others{1};
  const auto with = [&](double size) {
    for (size_t i = 0, known = others.size(); size > 1 && i < known && known < 64; ++i)
      others.push_back(others[i] * size);
  };
  for (int64_t dim = 0; dim < argument.tensor.dim(); ++dim) {
    if (dim != argument.sharding.dim()) {
      with(static_cast<double>(argument.tensor.size(dim)));
    } else {
      with(static_cast<double>(argument.sharding.outer));
      with(static_cast<double>(argument.sharding.inner));
    }
  }
  for (const int64_t length : argument.sharding.split->lengths)
    for (const double other : others) counts->push_back(other * static_cast<double>(length));
  return counts;
}

/// A total over a number of this rank's elements is no mean. Of activations and positions the same holds for what is
/// made of them.
void TokenPass::check_number(const OperatorCall& call, const FoundArguments& found) {
  if (takes_wholes()) return;
  const std::string& name = call.op.schema().name();
  const bool divides = name.starts_with("aten::div") || name.starts_with("aten::true_divide");
  if (!divides && !name.starts_with("aten::mul")) return;
  const c10::IValue& by = call.arguments()[1];
  std::optional<double> number;
  const auto take = [&](const at::Scalar& scalar) {
    if (!scalar.isComplex()) number = scalar.toDouble();
  };
  if (by.isScalar()) take(by.toScalar());
  if (by.isTensor() && by.toTensor().defined() && by.toTensor().dim() == 0 && by.toTensor().is_cpu() &&
      found[0].index == 0 && found.size() == 1)
    take(by.toTensor().item());
  if (!number || *number <= 1e-12) return;
  const Found& one = found[0];
  const bool is_total = one.sharding.kind == Sharding::Kind::kTotal;
  if (!is_total && !one.sharding.is_sharded()) return;
  if (is_total && one.sharding.counts == nullptr) return;
  if (!is_total && (one.sharding.dims.size() != 1 || (!divides && *number >= 1))) return;
  const auto counts = is_total ? one.sharding.counts : counts_of(one);
  constexpr double kSmallest = 8;  // smaller numbers are accumulation steps and the like
  const double asked = *number < 1 ? 1 / *number : *number;
  for (const double count : *counts)
    if (count >= kSmallest &&
        (std::abs(asked - count) < 1e-6 * count || (is_total && std::abs(asked * asked - count) < 1e-6 * count)))
      refuse(call, one,
             str(divides ? "divides by " : "multiplies by ", *number,
                 ", which is a number of this rank's elements, not of all: a result"),
             "use mean(), or count by an operator: mask.sum(), torch.ones_like(x).sum()");
}

void TokenPass::give_total(OperatorCall& call, const at::Tensor& result, const Found& argument) {
  table_.add(result, {.kind = Sharding::Kind::kTotal, .split = argument.sharding.split});
  give(call, {result});
}

void TokenPass::replace_by_total(OperatorCall& call, const at::Tensor& result, const Found& argument) {
  table_.add(result, {.kind = Sharding::Kind::kTotal, .split = argument.sharding.split, .counts = counts_of(argument)});
  call.stack.back() = result;
}

void TokenPass::run_reduction(OperatorCall& call, Next next, const OperatorRule& rule, const FoundArguments& found) {
  const Found one = found[0];
  const std::vector<int64_t> named = named_dims(call, one.tensor.dim());
  const c10::IValue keep = value_of(call, "keepdim");
  const bool keeps_dim = keep.isBool() && keep.toBool();
  const auto shifted = [&](int64_t dim) {
    return keeps_dim ? dim
                     : dim - std::count_if(named.begin(), named.end(), [&](int64_t other) { return other < dim; });
  };
  if (found.size() > 1 || one.index != 0) refuse(call, one, "reduces by a sharded number");
  if (is_whole(call, found)) {
    std::vector<c10::IValue> results = run_on(call, whole_arguments(call, found));
    c10::SmallVector<int64_t, 2> dims;
    for (const int64_t dim : one.sharding.dims)
      if (!named.empty() && !contains(named, dim)) dims.push_back(shifted(dim));
    for (c10::IValue& result : results) result = part(result.toTensor(), one.sharding, dims);
    return give(call, std::move(results));
  }
  const bool is_over_all = named.empty() || named.size() == static_cast<size_t>(one.tensor.dim());
  if (one.sharding.dims.size() > 1 || (one.sharding.kind == Sharding::Kind::kMerged && !is_over_all))
    refuse(call, one, "reduces dims that tokens went into", "keep tokens in a dim of their own");
  if (!is_over_all && !contains(named, one.sharding.dim())) {
    next(call);
    return add_results(call, one, [&](const at::Tensor&) { return shifted(one.sharding.dim()); });
  }
  if (!rule.sums)
    refuse(call, one, "reduces over the tokens",
           "over tokens there are sum(), mean(), any() and all(), such as x.square().sum().sqrt()");
  const std::string& name = call.op.schema().name();
  const int64_t numel = one.tensor.numel();
  next(call);
  const at::Tensor local = call.results()[0].toTensor();
  replace_by_total(call,
                   next.run(call,
                            [&]() -> at::Tensor {
                              if (name == "aten::any" || name == "aten::_is_any_true")
                                return total_sum(local.to(at::kLong)).gt(0);
                              if (name == "aten::all" || name == "aten::_is_all_true")
                                return total_sum(local.logical_not().to(at::kLong)).eq(0);
                              if (name != "aten::mean") return total_sum(local);
                              const int64_t count = numel / std::max<int64_t>(local.numel(), 1);
                              const at::Tensor sum = numel > 0 ? local * count : local.nan_to_num();
                              return total_mean(
                                  sum, at::full({1}, count, local.options().dtype(at::kDouble).requires_grad(false)));
                            }),
                   one);
}

/// Logits [N, C] or [N, C, …], targets without C, or with it where they are probabilities.
void TokenPass::run_class_loss(OperatorCall& call, Next next, const FoundArguments& found) {
  const at::Tensor logits = call.arguments()[0].toTensor(), target = call.arguments()[1].toTensor();
  const auto of_logits = table_.find(logits), of_target = table_.find(target);
  const auto is_sharded = [](const std::optional<Sharding>& one) {
    return one && one->has_tokens() && one->dims.size() == 1;
  };
  if (!is_sharded(of_logits) || !is_sharded(of_target))
    refuse(call, found[0], "joins logits and targets, of which only one is sharded: a part",
           "pass both through cut(), or compute them from tensors that were");
  const int64_t class_dim = logits.dim() > 1 ? 1 : 0;
  if (of_logits->dim() == class_dim)
    refuse(call, found[0], "takes the tokens for classes", "logits are [tokens, classes]");
  const bool is_soft = target.is_floating_point() && call.op.schema().name() == "aten::cross_entropy_loss";
  const int64_t expected = of_logits->dim() - (!is_soft && of_logits->dim() > class_dim);
  if (of_target->dim() != expected || of_target->outer != of_logits->outer || of_target->inner != of_logits->inner ||
      !is_same_selection(*of_target, *of_logits))
    refuse(call, found[0], str("joins logits with targets ", target.sizes(), " of other tokens: a part"));
  if (!of_target->split->matches(*of_logits->split) || of_target->split->total() != of_logits->split->total())
    refuse(call, found[0],
           str("joins logits with targets ", target.sizes(), " of ", of_target->split->total(), " tokens: a part"),
           "shift logits by [:, :-1] and labels by [:, 1:]");
  const Found like{0, target, *of_target};
  const size_t reduction_at = index_of(call, "reduction");
  const int64_t reduction = argument(call, reduction_at).toInt(),
                ignore_index = call.arguments()[index_of(call, "ignore_index")].toInt();
  const c10::IValue weight = call.arguments()[2];
  const at::Tensor class_weight = weight.isTensor() ? weight.toTensor() : at::Tensor();
  if (reduction == at::Reduction::None) {
    next(call);
    const int64_t dim = of_logits->dim() - (of_logits->dim() > class_dim);
    return add_results(call, like, [&](const at::Tensor&) { return dim; });
  }
  run_loss_of_total(call, next, reduction_at, like, [&](const at::TensorOptions& number) {
    return is_soft ? at::full({1}, logits.numel() / logits.size(class_dim), number)
                   : loss_weight(target, class_weight, ignore_index);
  });
}

/// The sum of this rank's losses, then the sum or the mean over all ranks'; `weight` is this rank's number of targets.
void TokenPass::run_loss_of_total(OperatorCall& call, Next next, size_t reduction_at, const Found& like,
                                  const std::function<at::Tensor(const at::TensorOptions& number)>& weight) {
  const int64_t reduction = argument(call, reduction_at).toInt();
  argument(call, reduction_at) = int64_t{at::Reduction::Sum};
  next(call);
  const at::Tensor sum = call.results()[0].toTensor();
  const auto over_ranks = [&] {
    if (reduction == at::Reduction::Sum) return total_sum(sum);
    return total_mean(sum, weight(sum.options().dtype(at::kDouble).requires_grad(false)));
  };
  replace_by_total(call, next.run(call, over_ranks), like);
}

/// Losses of elements, then their sum or mean.
void TokenPass::run_each_loss(OperatorCall& call, Next next, const FoundArguments& found) {
  const size_t reduction_at = index_of(call, "reduction");
  const int64_t reduction = argument(call, reduction_at).toInt();
  if (reduction == at::Reduction::None) return run_each(call, next, found);
  const Found like = check_aligned(call, found);
  check_unsharded(call, like);
  const auto sizes = at::infer_size(call.arguments()[0].toTensor().sizes(), call.arguments()[1].toTensor().sizes());
  const int64_t numel = c10::multiply_integers(sizes);
  run_loss_of_total(call, next, reduction_at, like,
                    [numel](const at::TensorOptions& number) { return at::full({1}, numel, number); });
}

}  // namespace trireme::sequence
