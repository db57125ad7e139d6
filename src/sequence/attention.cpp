#include "sequence/attention.h"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "trireme/activations/call_arguments.h"
#include "trireme/base/error.h"

namespace trireme::sequence {
namespace {

constexpr const char* kAttentionName = "aten::scaled_dot_product_attention";

/// [B, heads, tokens, D], cut along heads.
Cut by_heads(const Cut& tokens, Ranges heads) {
  return {.axis = tokens.axis, .dim = 1, .ranges = std::make_shared<const Ranges>(std::move(heads))};
}

/// The heads of keys and values that each rank's heads of queries attend with: ranks may share one.
Ranges heads_of_keys(int64_t key_heads, const Ranges& queries) {
  const int64_t queries_per_key = queries.whole() / key_heads;
  std::vector<std::vector<Interval>> of_rank;
  for (int rank = 0; rank < queries.ranks(); ++rank) {
    const Interval own = queries.of_rank(rank).front();
    of_rank.push_back({{own.begin / queries_per_key, (own.end - 1) / queries_per_key + 1}});
  }
  return Ranges(key_heads, std::move(of_rank));
}

/// All tokens of this rank's heads, of which it has some tokens of all heads.
at::Tensor to_heads(const at::Tensor& part, const Cut& tokens, const Cut& heads, AxisExchanges& axis) {
  return heads.ranges->is_whole_everywhere() ? axis.gather(part, tokens, kAttentionName)
                                             : axis.recut(part, tokens, heads, kAttentionName);
}

/// The heads of `mask` that this rank has.
at::Tensor of_heads(const at::Tensor& mask, const Ranges& heads, Interval own) {
  if (mask.dim() < 3 || mask.size(-3) != heads.whole() || heads.whole() == 1) return mask;
  return mask.narrow(-3, own.begin, own.size());
}

/// The heads of keys that the queries `own` of this rank attend with, one for each: `keys` has those of `range` alone.
at::Tensor one_for_each(const at::Tensor& keys, Interval range, Interval own, int64_t queries_per_key) {
  const at::Tensor heads = at::arange(own.begin, own.end, keys.options().dtype(at::kLong).requires_grad(false));
  return keys.index_select(1, heads.floor_divide(queries_per_key) - range.begin);
}

}  // namespace

void run_by_heads(OperatorCall& call, Next next, const Cut& queries, const Cut& keys, const at::Tensor& mask,
                  AxisExchanges& axis) {
  const bool has_batch = argument(call, kQuery).toTensor().dim() == 4;
  const auto with_batch = [&](size_t index) {
    const at::Tensor tensor = argument(call, index).toTensor();
    return has_batch ? tensor : tensor.unsqueeze(0);
  };
  const int ranks = axis.group().size(), rank = axis.group().rank();
  const int64_t heads = with_batch(kQuery).size(1), key_heads = with_batch(kKey).size(1);
  if (heads < ranks)
    throw StateError(str(kAttentionName, " over a sharded sequence: ", heads, " heads for ", ranks,
                         " ranks; use at most as many ranks as heads, or ring attention"));
  Cut query_tokens = queries, key_tokens = keys;
  query_tokens.dim = key_tokens.dim = 2;
  const Cut query_heads = by_heads(queries, Ranges::even(heads, ranks));
  const Cut key_cut = by_heads(keys, heads_of_keys(key_heads, *query_heads.ranges));
  next.run(call, [&] {
    at::Tensor query = to_heads(with_batch(kQuery), query_tokens, query_heads, axis);
    at::Tensor key = to_heads(with_batch(kKey), key_tokens, key_cut, axis);
    at::Tensor value = to_heads(with_batch(kValue), key_tokens, key_cut, axis);
    const Interval own = query_heads.ranges->of_rank(rank).front(), own_keys = key_cut.ranges->of_rank(rank).front();
    const int64_t queries_per_key = heads / key_heads;
    if (own.size() != own_keys.size() * queries_per_key) {
      key = one_for_each(key, own_keys, own, queries_per_key);
      value = one_for_each(value, own_keys, own, queries_per_key);
      argument(call, kEnableGqa) = false;
    }
    if (mask.defined()) argument(call, kMask) = of_heads(mask, *query_heads.ranges, own);
    argument(call, kQuery) = query;
    argument(call, kKey) = key;
    argument(call, kValue) = value;
  });
  next(call);
  const at::Tensor attended = call.stack.back().toTensor();
  call.stack.back() = next.run(call, [&] {
    const at::Tensor result = axis.recut(attended, query_heads, query_tokens, kAttentionName);
    return has_batch ? result : result.squeeze(0);
  });
}

}  // namespace trireme::sequence
