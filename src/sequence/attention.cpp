#include "sequence/attention.h"

#include <ATen/ops/arange.h>

#include <utility>

#include "sequence/head_exchange.h"
#include "sequence/token_pass.h"
#include "trireme/base/error.h"

namespace trireme::sequence {
namespace {

constexpr const char* kName = "scaled_dot_product_attention over a sharded sequence";

/// Positions of its arguments.
enum : size_t { kQuery, kKey, kValue, kMask, kDropout, kIsCausal, kScale, kEnableGqa };

/// The heads of `mask` that this rank has.
at::Tensor of_heads(const at::Tensor& mask, const HeadRanges& heads, int rank) {
  if (mask.dim() < 3 || mask.size(-3) != heads.heads || heads.heads == 1) return mask;
  return mask.narrow(-3, heads[rank].begin, heads[rank].numel());
}

/// The heads of keys that the queries `own` of this rank attend with, one for each: `keys` has those of `range` alone.
at::Tensor one_for_each(const at::Tensor& keys, const ShardRange& range, const ShardRange& own,
                        int64_t queries_per_key) {
  const at::Tensor heads = at::arange(own.begin, own.end, keys.options().dtype(at::kLong).requires_grad(false));
  return keys.index_select(1, heads.floor_divide(queries_per_key) - range.begin);
}

}  // namespace

void run_by_heads(OperatorCall& call, Next next, const TokenSplit& queries, const TokenSplit& keys,
                  const at::Tensor& mask, Group& group) {
  const bool has_batch = argument(call, kQuery).toTensor().dim() == 4;
  const auto with_batch = [&](size_t index) {
    const at::Tensor tensor = argument(call, index).toTensor();
    return has_batch ? tensor : tensor.unsqueeze(0);
  };
  const int64_t heads = with_batch(kQuery).size(1), key_heads = with_batch(kKey).size(1);
  if (heads < group.size())
    throw StateError(str(kName, ": ", heads, " heads for ", group.size(),
                         " ranks; use at most as many ranks as heads, or ring attention"));
  const HeadRanges query_heads = HeadRanges::of_queries(heads, group.size());
  const HeadRanges heads_of_keys = HeadRanges::of_keys(key_heads, query_heads);
  next.run(call, [&] {
    at::Tensor query = to_heads(with_batch(kQuery), query_heads, queries, group);
    at::Tensor key = to_heads(with_batch(kKey), heads_of_keys, keys, group);
    at::Tensor value = to_heads(with_batch(kValue), heads_of_keys, keys, group);
    const ShardRange &own = query_heads[group.rank()], &own_keys = heads_of_keys[group.rank()];
    const int64_t queries_per_key = heads / key_heads;
    if (own.numel() != own_keys.numel() * queries_per_key) {
      key = one_for_each(key, own_keys, own, queries_per_key);
      value = one_for_each(value, own_keys, own, queries_per_key);
      argument(call, kEnableGqa) = false;
    }
    if (mask.defined()) argument(call, kMask) = of_heads(mask, query_heads, group.rank());
    argument(call, kQuery) = query;
    argument(call, kKey) = key;
    argument(call, kValue) = value;
  });
  next(call);
  const at::Tensor attended = call.stack.back().toTensor();
  call.stack.back() = next.run(call, [&] {
    const at::Tensor result = to_tokens(attended, query_heads, queries, group);
    return has_batch ? result : result.squeeze(0);
  });
}

}  // namespace trireme::sequence
