#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "recompute/deferred.h"
#include "recompute/tiled_loss.h"
#include "trireme/intercept.h"
#include "trireme/operators/row.h"
#include "trireme/operators/rules.h"
#include "trireme/recompute/tiled.h"

namespace trireme {
namespace {

using detail::Deferred;
using detail::deferred_rows;
using detail::DeferredRows;
using detail::RowExpression;
using detail::Rows;

void give(OperatorCall& call, at::Tensor result) {
  torch::jit::drop(call.stack, call.traits.arguments);
  call.stack.emplace_back(std::move(result));
}

bool is_ordinary(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.layout() == at::kStrided && tensor.is_floating_point() &&
         !tensor.unsafeGetTensorImpl()->key_set().has_any(c10::DispatchKeySet(
             {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper}));
}

bool is_leaf_weight(const at::Tensor& tensor) {
  return tensor.requires_grad() && (tensor.is_view() ? tensor._base().is_leaf() : tensor.is_leaf());
}

bool is_deferred(const at::Tensor& tensor) { return Deferred::of(tensor) != nullptr; }

bool gives_views(const c10::FunctionSchema& schema) {
  if (schema.returns().size() != 1 || schema.arguments().empty()) return false;
  const c10::AliasInfo* const result = schema.returns()[0].alias_info();
  const c10::AliasInfo* const argument = schema.arguments()[0].alias_info();
  return result != nullptr && argument != nullptr && !result->isWrite() && !argument->isWrite();
}

/// The part that an operator can have in tiles, by the tables: none where it writes.
struct TilePart {
  const OperatorRow* row = nullptr;  ///< null: it has none
  bool is_product = false, is_loss = false, is_table = false, is_view = false;
  bool may_be_by_element = false, may_be_copy = false;  ///< may_be_copy: a view where that is possible

  explicit TilePart(const OperatorCall& call) {
    if (call.traits.written != 0) return;
    row = row_of(call.op);
    const OperatorRule* const rule = rule_of(call.op);
    is_loss = rule != nullptr && rule->role == OperatorRole::kClassLoss;
    const Elements elements = row == nullptr ? Elements::kComputed : row->elements;
    is_view = (elements == Elements::kComputed || elements == Elements::kAlias) && gives_views(call.op.schema());
    if (row == nullptr) return;
    is_product = rule != nullptr && rule->role == OperatorRole::kProduct;
    is_table = rule != nullptr && rule->role == OperatorRole::kLookup && row->makes_activations;
    may_be_by_element = row->is_each() && (elements == Elements::kComputed || elements == Elements::kSame);
    may_be_copy = !row->is_each() && elements == Elements::kSame;
  }
};

/// (width, K), in whichever order the weight of a product has them.
std::pair<int64_t, int64_t> shape_of_weight(const OperatorRow& operators, const OperatorCall& call, size_t weight) {
  const Row row = operators.row(RowCall(call.op, call.arguments()));
  const at::IntArrayRef sizes = call.arguments()[weight].toTensor().sizes();
  return row.arguments[weight][0] == row.results[0].back() ? std::pair(sizes[0], sizes[1])
                                                           : std::pair(sizes[1], sizes[0]);
}

/// Whether a call computes each element by the same one of its arguments `of`, whose sizes the result has, and has of
/// all others one value, or one for each column.
bool is_by_element(const Row& row, const RowCall& call, const std::vector<size_t>& of) {
  if (row.results.size() != 1 || row.results[0].empty()) return false;
  const TensorFactors& result = row.results[0];
  const auto has = [](const DimFactors& dim, uint8_t factor) { return std::ranges::count(dim, factor) > 0; };
  for (size_t i = 0; i < row.arguments.size(); ++i) {
    const bool is_other = std::ranges::count(of, i) == 0;
    if (is_other ? call.dims(i) > 1 : row.arguments[i] != result) return false;
    if (row.unread >> i & 1) continue;
    for (const DimFactors& dim : row.arguments[i])
      for (const uint8_t factor : dim)
        if (row.factors[factor].kind != FactorKind::kEach || (is_other && !has(result.back(), factor))) return false;
  }
  return true;
}

std::vector<int64_t> with_width(at::IntArrayRef sizes, int64_t width) {
  std::vector<int64_t> result = sizes.vec();
  result.back() = width;
  return result;
}

}  // namespace

class TiledComputation::Impl final : public Pass {
 public:
  Impl(const TilePolicy& policy, IsParameter is_parameter)
      : policy_(policy),
        is_parameter_(is_parameter ? std::move(is_parameter) : is_leaf_weight),
        scope_(InterceptScope::Watch::kWrites, this) {}

  PassOrder order() const override { return PassOrder::kTiles; }

  void run(OperatorCall& call, Next next) override {
    const TilePart& part = part_of(call);
    if (part.is_table) note_table(call);
    if (has_deferred()) materialize_what_is_from_outside(call, next);
    if (part.is_product && at::GradMode::is_enabled() && defer_product(*part.row, call, next)) return;
    if (!has_deferred()) return next(call);
    if (call.traits.written != 0) materialize_what_starts_from_written(call, next);
    bool reads_deferred = false;
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) { reads_deferred |= is_deferred(tensor); });
    if (!reads_deferred) return next(call);
    if (part.is_view && view(call, next)) return;
    if (at::GradMode::is_enabled() && compute(part, call, next)) return;
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) { materialize(tensor, call, next); });
    next(call);
  }

 private:
  const TilePart& part_of(const OperatorCall& call) {
    if (const auto found = parts_.find(call.op); found != parts_.end()) return found->second;
    return parts_.emplace(call.op, TilePart(call)).first->second;
  }

  void note_table(const OperatorCall& call) {
    const at::Tensor& table = call.arguments()[0].toTensor();
    if (policy_.loss_tokens > 0 && table.dim() == 2) tables_.emplace(table.size(0), table.size(1));
  }

  bool has_deferred() {
    std::erase_if(deferred_, [](const std::weak_ptr<Deferred>& weak) { return weak.expired(); });
    return !deferred_.empty();
  }

  static void materialize(const at::Tensor& tensor, const OperatorCall& call, Next next) {
    if (const auto deferred = Deferred::of(tensor)) next.run(call, [&] { deferred->materialize(); });
  }

  static void materialize_what_is_from_outside(const OperatorCall& call, Next next) {
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
      if (const auto deferred = Deferred::of(tensor); deferred && deferred->is_from_outside())
        next.run(call, [&] { deferred->materialize(); });
    });
  }

  void materialize_what_starts_from_written(const OperatorCall& call, Next next) {
    for (uint32_t i = 0; i < call.traits.arguments && i < 64; ++i) {
      if (!(call.traits.written >> i & 1)) continue;
      for_each_tensor(call.arguments().slice(i, 1), [&](const at::Tensor& tensor) {
        if (!tensor.defined() || !tensor.has_storage()) return;
        const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
        for (const std::weak_ptr<Deferred>& weak : std::vector(deferred_))
          if (const auto deferred = weak.lock(); deferred && deferred->starts_from(storage))
            next.run(call, [&] { deferred->materialize(); });
      });
    }
  }

  /// A product that may be one of those to tile: its result becomes a deferred tensor.
  bool defer_product(const OperatorRow& row, OperatorCall& call, Next next) {
    const size_t hole = left_factor_index(call.op);
    const at::Tensor input = call.arguments()[hole].toTensor(), weight = call.arguments()[hole + 1].toTensor();
    if (!is_ordinary(input) || !is_ordinary(weight) || input.dim() < 2 || weight.dim() != 2) return false;
    if (is_deferred(input) || input.numel() == 0) return false;
    const std::pair<int64_t, int64_t> shape = shape_of_weight(row, call, hole + 1);
    const int64_t rows = input.numel() / input.size(-1);
    const bool is_wide = policy_.mlp_tokens > 0 && rows > policy_.mlp_tokens && shape.first > input.size(-1);
    const bool is_logits = policy_.loss_tokens > 0 && rows > policy_.loss_tokens && tables_.contains(shape);
    if (!is_wide && !is_logits) return false;
    if (!is_parameter_(weight) || !(weight.requires_grad() || input.requires_grad())) return false;
    const at::Tensor leaf = next.run(call, [&] { return input.dim() == 2 ? input : input.flatten(0, -2); });
    const Rows expression = RowExpression::of(call, {{hole, RowExpression::leaf(0)}});
    give(call, defer({expression, leaf, input}, input.sizes(), call, next));
    return true;
  }

  at::Tensor defer(Deferred::Parts parts, at::IntArrayRef sizes, const OperatorCall& call, Next next) {
    const at::Tensor sample = sample_of(*parts.expression, parts.rows, call, next);
    const at::Tensor tensor = Deferred::make(std::move(parts), with_width(sizes, sample.size(-1)), sample);
    deferred_.push_back(Deferred::of(tensor));
    return tensor;
  }

  /// A tensor of `expression`'s dtype, device and width, of no rows.
  static at::Tensor sample_of(const RowExpression& expression, const at::Tensor& rows, const OperatorCall& call,
                              Next next) {
    const at::NoGradGuard no_grad;
    return next.run(call, [&] { return expression.evaluate({rows.narrow(0, 0, 0)}); });
  }

  /// A view that reads no data. False: the operator is to run on the whole tensor.
  static bool view(OperatorCall& call, Next next) {
    const std::shared_ptr<Deferred> deferred =
        Deferred::of(call.arguments()[0].isTensor() ? call.arguments()[0].toTensor() : at::Tensor());
    if (!deferred) return false;
    call.op.redispatchBoxed(call.keys, &call.stack);
    bool are_rows = at::GradMode::is_enabled();
    // A reader of a tensor without its gradient wants its data, and may take them without an operator.
    for_each_tensor(call.results(), [&](const at::Tensor& tensor) {
      are_rows = are_rows && tensor.requires_grad() && deferred_rows(tensor);
    });
    if (!are_rows) next.run(call, [&] { deferred->materialize(); });
    return true;
  }

  bool compute(const TilePart& part, OperatorCall& call, Next next) {
    if (part.is_loss) return tile_loss(call, next);
    if (part.is_product) return tile_product(call, next);
    if (call.traits.random) return drop_nothing(call);
    if (part.may_be_by_element && defer_by_element(*part.row, call, next)) return true;
    return part.may_be_copy && copy(call, next);
  }

  static std::optional<DeferredRows> plain_rows(const at::Tensor& tensor) {
    auto rows = deferred_rows(tensor);
    if (!rows || !rows->deferred->is_plain_view(tensor)) return {};
    return rows;
  }

  static Deferred::Parts parts_of(const DeferredRows& rows, Rows expression, const OperatorCall& call, Next next) {
    const Deferred::Parts& parts = rows.deferred->parts();
    if (!rows.row_numbers.defined()) return {std::move(expression), parts.rows, parts.source};
    const at::Tensor leaf = next.run(call, [&] { return rows.leaf(); });
    return {std::move(expression), leaf, leaf};
  }

  bool defer_by_element(const OperatorRow& operators, OperatorCall& call, Next next) {
    std::optional<DeferredRows> first;
    at::Tensor shape;  // the tensor whose sizes the result has
    std::vector<size_t> deferred;
    RowExpression::Holes holes;
    size_t number = 0;  // of the tensor
    for (size_t i = 0; i < call.traits.arguments; ++i) {
      const c10::IValue& argument = call.arguments()[i];
      if (!argument.isTensor()) continue;
      const at::Tensor& tensor = argument.toTensor();
      ++number;
      if (!is_deferred(tensor)) continue;
      auto rows = plain_rows(tensor);
      if (!rows) return false;
      if (first && (rows->row_numbers.defined() || first->row_numbers.defined() || tensor.sizes() != shape.sizes() ||
                    !rows->deferred->parts().source.is_same(first->deferred->parts().source)))
        return false;
      deferred.push_back(number - 1);
      holes.emplace_back(i, rows->expression);
      if (first) continue;
      first = std::move(rows);
      shape = tensor;
    }
    const RowCall of_wholes(call.op, call.arguments());
    if (!first || !is_by_element(operators.row(of_wholes), of_wholes, deferred)) return false;
    const auto format = static_cast<at::MemoryFormat>(of_wholes.integer("memory_format", 0));
    if (format != at::MemoryFormat::Contiguous && format != at::MemoryFormat::Preserve) return false;
    const Rows expression = RowExpression::of(call, std::move(holes));
    const at::Tensor sample = sample_of(*expression, first->deferred->parts().rows, call, next);
    if (!sample.is_floating_point() || sample.device() != shape.device()) return false;
    const bool is_same =
        operators.elements == Elements::kSame && sample.scalar_type() == shape.scalar_type() && shape.is_contiguous();
    if (is_same && first->expression == first->deferred->parts().expression)
      give(call, at::Tensor(shape));
    else
      give(call, defer(parts_of(*first, expression, call, next), shape.sizes(), call, next));
    return true;
  }

  /// An operator that draws gives its argument itself where nothing is dropped.
  static bool drop_nothing(OperatorCall& call) {
    const RowCall plain(call.op, call.arguments());
    const c10::IValue &share = plain.value("p"), &drops = plain.value("train");
    if (call.op.schema().returns().size() != 1 || !share.isDouble() || !drops.isBool()) return false;
    if (share.toDouble() > 0 && drops.toBool()) return false;
    give(call, at::Tensor(call.arguments()[0].toTensor()));
    return true;
  }

  /// reshape(), flatten(): a view of the tensor, or of a deferred copy of its rows.
  bool copy(OperatorCall& call, Next next) {
    c10::IValue& argument = call.stack[call.stack.size() - call.traits.arguments];
    const at::Tensor tensor = argument.toTensor();
    if (!tensor.is_contiguous()) {
      const auto rows = plain_rows(tensor);
      if (!rows) return false;
      argument = defer(parts_of(*rows, rows->expression, call, next), tensor.sizes(), call, next);
    }
    return view(call, next);
  }

  bool tile_product(OperatorCall& call, Next next) {
    const size_t hole = left_factor_index(call.op);
    const at::Tensor input = call.arguments()[hole].toTensor(), weight = call.arguments()[hole + 1].toTensor();
    const auto rows = plain_rows(input);
    if (policy_.mlp_tokens == 0 || !rows || rows->row_numbers.defined() || !is_ordinary(weight)) return false;
    if (is_deferred(weight) || weight.dim() != 2 || !is_parameter_(weight)) return false;
    const Rows expression = RowExpression::of(call, {{hole, rows->expression}});
    at::Tensor result = tile(policy_.mlp_tokens, *rows, expression, {}, call, next);
    const auto sizes = with_width(input.sizes(), result.size(-1));
    give(call, next.run(call, [&] { return result.view(sizes); }));
    return true;
  }

  bool tile_loss(OperatorCall& call, Next next) {
    const auto arguments = call.arguments();
    const at::Tensor logits = arguments[0].toTensor(), target = arguments[1].toTensor();
    const auto rows = plain_rows(logits);
    if (policy_.loss_tokens == 0 || !rows || logits.dim() != 2 || target.dim() != 1 ||
        !c10::isIntegralType(target.scalar_type(), false))
      return false;
    const TiledLossOptions options{.class_weight = arguments[2].isTensor() ? arguments[2].toTensor() : at::Tensor(),
                                   .reduction = arguments[3].toInt(),
                                   .ignore_index = arguments[4].toInt()};
    call.stack[call.stack.size() - call.traits.arguments + 3] = int64_t{at::Reduction::None};
    const Rows expression = RowExpression::of(call, {{0, rows->expression}, {1, RowExpression::leaf(1)}});
    const at::Tensor losses = tile(policy_.loss_tokens, *rows, expression, {target}, call, next);
    give(call, next.run(call, [&] { return detail::reduce_losses(losses, target, options); }));
    return true;
  }

  static at::Tensor tile(int64_t tokens, const DeferredRows& rows, const Rows& expression,
                         const std::vector<at::Tensor>& more_leaves, const OperatorCall& call, Next next) {
    rows.deferred->check_versions();
    const TileOptions options{
        .tokens = tokens, .recompute = {.preserve_rng_state = false, .name = str("tile of ", call.op.schema().name())}};
    return next.run(call, [&] {
      std::vector<at::Tensor> leaves = {rows.leaf()};
      leaves.insert(leaves.end(), more_leaves.begin(), more_leaves.end());
      return tiled(
          options, [expression](const auto& tile) { return expression->evaluate(tile); }, leaves);
    });
  }

  const TilePolicy policy_;
  const IsParameter is_parameter_;
  std::unordered_map<c10::OperatorHandle, TilePart> parts_;
  std::set<std::pair<int64_t, int64_t>> tables_;  // shapes of embedding tables
  std::vector<std::weak_ptr<Deferred>> deferred_;
  InterceptScope scope_;
};

void check(const TilePolicy& policy) {
  for (const int64_t tokens : {policy.loss_tokens, policy.mlp_tokens})
    if (tokens < 0)
      throw ConfigError(str("tiled computation: tiles of ", tokens, " tokens; use at least 1, or 0 for none"));
}

TiledComputation::TiledComputation(const TilePolicy& policy, IsParameter is_parameter) {
  check(policy);
  impl_ = std::make_unique<Impl>(policy, std::move(is_parameter));
}

TiledComputation::~TiledComputation() = default;

}  // namespace trireme
