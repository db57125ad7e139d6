#include "tensor/tensor_policy.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "tensor/class_loss.h"
#include "trireme/base/error.h"

namespace trireme::tensor {
namespace {

enum : size_t { kQuery, kKey, kValue, kEnableGqa = 7 };

const PlacedArgument* find_in(const PlacedArguments& found, size_t index) {
  const auto known = std::ranges::find(found, index, &PlacedArgument::index);
  return known != found.end() ? &*known : nullptr;
}

/// Rows of a product of `left` [.., n] and a matrix whose sum over ranks is worth starting before the product is whole;
/// 0: none. From shapes alone, which are alike on all ranks but for n.
int64_t piece_rows_of(const at::Tensor& left, const at::Tensor& right, bool is_weight) {
  constexpr int64_t kPieces = 4, kFewestBytes = 256 << 10;
  if (right.dim() != 2 || left.dim() < 2 || left.size(-1) == 0) return 0;
  const int64_t rows = left.numel() / left.size(-1);
  const int64_t row_bytes = right.size(is_weight ? 0 : 1) * left.element_size();
  const int64_t pieces = std::min(kPieces, rows * row_bytes / kFewestBytes);
  return pieces < 2 ? 0 : (rows + pieces - 1) / pieces;
}

}  // namespace

std::string TensorPolicy::fix_for_unknown(const c10::OperatorHandle&) const {
  return "gather it first (engine.gather(tensor)), say by register_partition_rule() what its slices are, or leave the "
         "parameter whole that it is computed from (partition_config, \"partition_type\": \"skip\")";
}

bool TensorPolicy::fit(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) {
  const OperatorRule* const rule = rules_(call.op);
  return rule == nullptr || rule->role != OperatorRole::kAttention || fit_heads(pass, call, next, found);
}

bool TensorPolicy::run(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) {
  const OperatorRule* const rule = rules_(call.op);
  if (rule == nullptr) return false;
  if (rule->role == OperatorRole::kClassLoss && run_class_loss(pass, call, next, found)) return true;
  if (rule->role == OperatorRole::kPart && pass.may_read_parts()) return run_part(pass, call, next, found);
  if (rule->role != OperatorRole::kClassLoss && mean_wholes(pass, call, found[0])) return false;
  pass.run_whole(call, next, found);
  return true;
}

// --- sums ---

at::Tensor TensorPolicy::summed_product(AxisPass& pass, const OperatorCall& call, Next next) {
  const OperatorRule* const rule = rules_(call.op);
  if (!overlaps_sums_ || shards_tokens_ || rule == nullptr || rule->role != OperatorRole::kProduct) return {};
  const size_t first = left_factor_index(call.op);
  const at::Tensor left = call.arguments()[first].toTensor(), right = call.arguments()[first + 1].toTensor();
  const bool is_weight = first == 0 && value_of(call, "weight").isTensor();
  const int64_t rows = piece_rows_of(left, right, is_weight);
  if (rows == 0) return {};
  const auto device = left.device().type();
  // Factors get their dtype where autograd sees it; autocast keeps the copies of weights, with their gradients.
  const auto cast = [&](const at::Tensor& factor) {
    if (!at::autocast::is_autocast_enabled(device)) return factor;
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), factor, device);
  };
  std::vector<int64_t> sizes = left.sizes().vec();
  sizes.back() = right.size(is_weight ? 0 : 1);
  return next.run(call, [&] {
    return pass.exchanges(axis_)
        .sum_product(cast(left).reshape({-1, left.size(-1)}), cast(right), is_weight, rows, call.op.schema().name())
        .view(sizes);
  });
}

/// The dim before the last, where tokens are sharded.
std::optional<Cut> TensorPolicy::scattered(const AxisPass& pass, const OperatorCall& call, const at::Tensor& part) {
  const int64_t dim = part.dim() - 2;
  const std::string& name = call.op.schema().name();
  // Two dims may be anything: a matrix of weights alone, as a penalty has it.
  const bool is_of_tokens =
      part.dim() > 2 || name == "aten::linear" || name == "aten::addmm" || name == "aten::embedding";
  if (!shards_tokens_ || !is_of_tokens || dim < 0 || part.size(dim) < ranks_ || part.numel() == 0) return {};
  if (pass.may_read_parts())
    throw StateError(
        str(name,
            ": tokens are sharded (tensor_parallel.sequence_parallel), and a C++ module that reads sizes of "
            "activations sees those of its own tokens; leave sequence_parallel out, or, where the module "
            "reads sizes of its inputs alone, set InitializeOptions::takes_sizes_from_inputs"));
  const auto known = token_ranges_.try_emplace(part.size(dim), nullptr).first;
  if (known->second == nullptr) known->second = std::make_shared<const Ranges>(Ranges::even(part.size(dim), ranks_));
  return Cut{.axis = axis_, .dim = dim, .ranges = known->second};
}

// --- attention ---

/// The heads of keys or values that this rank's queries attend with, one for each query head.
at::Tensor TensorPolicy::heads_by_query(AxisPass& pass, const OperatorCall& call, const at::Tensor& keys,
                                        const PlacedArgument* known, const PlacedArgument& query) {
  const Cut& of_query = *cut_of(pass, query);
  const Cut* const of_keys = known != nullptr ? cut_of(pass, *known) : nullptr;
  const int64_t dim = keys.dim() - 3, rank = pass.group(axis_).rank();
  const int64_t heads = of_keys != nullptr ? of_keys->whole() : keys.size(dim);
  const int64_t group = of_query.whole() / heads;
  if (of_query.outer != 1 || of_query.whole() % heads != 0 || (of_keys != nullptr && of_keys->outer != 1))
    pass.refuse(call, query.tensor, str("attends with ", keys.sizes(), ", whose heads do not fit a part"),
                "let heads be a dim of their own");
  // Whether every rank has the heads that it needs is the same on all ranks.
  bool has_all = of_keys != nullptr;
  for (int other = 0; has_all && other < ranks_; ++other)
    for (const Interval& part : of_query.ranges->of_rank(other))
      for (int64_t head = part.begin; has_all && head < part.end; ++head)
        has_all = of_keys->ranges->find(other, head / group).has_value();
  at::Tensor all = keys;
  if (!has_all) {
    if (of_keys != nullptr) all = pass.exchanges(axis_).gather(keys, *of_keys, call.op.schema().name());
    all = pass.enter(all, axis_);
  }
  std::vector<int64_t> places;
  for (const Interval& part : of_query.ranges->of_rank(rank))
    for (int64_t head = part.begin; head < part.end; ++head)
      places.push_back(has_all ? *of_keys->ranges->find(rank, head / group) : head / group);
  return all.index_select(dim, at::tensor(places, at::TensorOptions().dtype(at::kLong).device(keys.device())));
}

/// Keys and values get the heads of this rank's queries where ranks share some; false: they do not fit.
bool TensorPolicy::fit_heads(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) {
  const auto heads_of = [&](size_t index) -> const Cut* {
    const PlacedArgument* const known = find_in(found, index);
    const Cut* const cut = known != nullptr ? cut_of(pass, *known) : nullptr;
    return cut != nullptr && known->tensor.dim() - cut->dim == 3 ? cut : nullptr;
  };
  const Cut* const of_query = heads_of(kQuery);
  if (of_query == nullptr) return true;
  const auto is_fit = [&](size_t index) {
    const at::Tensor keys = call.arguments()[index].toTensor();
    const PlacedArgument* const known = find_in(found, index);
    const Cut* const cut = heads_of(index);
    if (keys.dim() < 3 || (known != nullptr && cut == nullptr && cut_of(pass, *known) != nullptr)) return true;
    const int64_t heads = cut != nullptr ? cut->whole() : keys.size(-3);
    if (heads == of_query->whole()) return true;
    return cut != nullptr && cut->ranges->times(of_query->whole() / heads) == *of_query->ranges;
  };
  const bool keys_fit = is_fit(kKey), values_fit = is_fit(kValue);
  if (keys_fit || values_fit) return keys_fit && values_fit;
  const PlacedArgument query = *find_in(found, kQuery);
  for (const size_t index : {kKey, kValue}) {
    const PlacedArgument* const known = find_in(found, index);
    const at::Tensor keys = call.arguments()[index].toTensor();
    const at::Tensor own = next.run(call, [&] { return heads_by_query(pass, call, keys, known, query); });
    Cut cut = *of_query;
    cut.dim = own.dim() - 3;
    auto made = std::make_shared<const PlacedTensor>(
        pass.with_cut(known != nullptr ? PlacedTensor{.placement = known->known->placement} : PlacedTensor{}, cut));
    std::erase_if(found, [index](const PlacedArgument& one) { return one.index == index; });
    found.push_back({index, own, std::move(made)});
    std::ranges::sort(found, {}, &PlacedArgument::index);
    argument(call, index) = own;
  }
  argument(call, kEnableGqa) = false;
  return true;
}

// --- cross entropy ---

/// Logits of which each rank has the columns of some classes stay so. Means leave ignored targets out.
bool TensorPolicy::run_class_loss(AxisPass& pass, OperatorCall& call, Next next, const PlacedArguments& found) {
  const PlacedArgument one = found[0];
  const Cut* const cut = cut_of(pass, one);
  const bool is_entropy = call.op.schema().argumentIndexWithName("label_smoothing").has_value();  // else of log softmax
  if (!is_entropy || found.size() > 1 || one.index != 0 || cut == nullptr || one.tensor.dim() != 2 || cut->dim != 1 ||
      cut->outer != 1 || cut->ranges->overlaps() || call.arguments()[2].isTensor())
    return false;
  const at::Tensor targets = call.arguments()[1].toTensor();
  if (!at::isIntegralType(targets.scalar_type(), /*includeBool=*/false)) return false;
  const int64_t reduction = call.arguments()[3].toInt();
  const c10::SymInt ignored_index = call.arguments()[4].toSymInt();
  const int64_t ignored = ignored_index.guard_int(__FILE__, __LINE__);
  const double smoothing = call.arguments()[5].toDouble();
  const at::Tensor result = next.run(call, [&] {
    const at::Tensor is_ignored = targets.eq(ignored);
    const at::Tensor is_class = targets.ge(0).logical_and(targets.lt(cut->ranges->whole())).logical_or(is_ignored);
    if (is_class.is_cpu() && !is_class.all().item<bool>())
      throw ShapeError(str(call.op.schema().name(), ": a target is none of ", cut->ranges->whole(), " classes, nor ",
                           ignored, ", which is ignored"));
    const bool widens = at::autocast::is_autocast_enabled(one.tensor.device().type());  // as autocast has losses
    const at::Tensor logits = widens ? one.tensor.to(at::kFloat) : one.tensor;
    const at::Tensor losses =
        cross_entropy(logits, targets, *cut, ignored, smoothing, pass.exchanges(axis_).shared_from_this());
    if (reduction == at::Reduction::None) return losses;
    const at::Tensor sum = losses.sum();
    return reduction == at::Reduction::Sum ? sum : sum / is_ignored.logical_not().sum().to(sum.scalar_type());
  });
  give(call, {result});
  return true;
}

}  // namespace trireme::tensor
