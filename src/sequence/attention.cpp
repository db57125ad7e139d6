#include "sequence/attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include "sequence/head_exchange.h"
#include "trireme/base/error.h"

namespace trireme::sequence {
namespace {

constexpr const char* kName = "scaled_dot_product_attention over a cut sequence";

/// Positions of its arguments.
enum : size_t { kQuery, kKey, kValue, kMask, kDropout, kIsCausal, kScale, kEnableGqa };

c10::IValue& argument(OperatorCall& call, size_t index) {
  return call.stack[call.stack.size() - call.traits.arguments + index];
}

at::Tensor part_of(const at::Tensor& whole_BHQK, const Cut& queries, const Cut& keys) {
  at::Tensor part = whole_BHQK;
  if (part.size(-2) > 1) part = part.narrow(-2, queries.before(queries.rank), queries.local());
  return part.narrow(-1, keys.before(keys.rank), keys.local());
}

/// Which keys count: those that are no padding, and in causal attention no later ones. [B or 1, 1, Q or 1, K] bool.
at::Tensor kept(const at::Tensor& padding_mask, const Cut& queries, const Cut& keys, bool is_causal,
                at::Device device) {
  at::Tensor result = padding_mask.defined()
                          ? padding_mask.to(at::kBool).unsqueeze(1).unsqueeze(1)
                          : at::ones({1, 1, 1, keys.total()}, at::TensorOptions(device).dtype(at::kBool));
  if (is_causal) {
    const at::TensorOptions integers = at::TensorOptions(device).dtype(at::kLong);
    result =
        result.logical_and(at::arange(queries.total(), integers).unsqueeze(1).ge(at::arange(keys.total(), integers)));
  }
  return result;
}

/// The mask for all tokens that is `mask` where this rank's tokens meet: models make masks of local length from the
/// padding and causality, of which we know the whole.
at::Tensor completed(const at::Tensor& mask, const Cut& queries, const Cut& keys, const at::Tensor& padding_mask) {
  const bool is_additive = mask.scalar_type() != at::kBool;
  const at::Tensor local = is_additive ? mask.eq(0) : mask;
  for (const bool is_causal : {true, false}) {
    const at::Tensor whole = kept(padding_mask, queries, keys, is_causal, mask.device());
    const at::Tensor expected = part_of(whole, queries, keys);
    if (!expected.logical_xor(local).any().item<bool>())
      return is_additive ? at::zeros_like(whole, mask.options()).masked_fill(whole.logical_not(), mask.min()) : whole;
  }
  throw StateError(str(kName, ": its mask ", mask.sizes(), " is of this rank's ", keys.local(),
                       " tokens, and is not that of causal attention or of the padding; pass a mask of all ",
                       keys.total(), " tokens, or the padding as `attention_mask` of cut()"));
}

at::Tensor mask_for_heads(const at::Tensor& mask, const Cut& queries, const Cut& keys, const at::Tensor& padding_mask,
                          const HeadRanges& heads) {
  const bool has_all_keys = mask.size(-1) == keys.total() || mask.size(-1) == 1;
  const bool has_all_queries = mask.size(-2) == queries.total() || mask.size(-2) == 1;
  at::Tensor whole = mask;
  if (!has_all_keys || !has_all_queries) {
    if (mask.size(-1) != keys.local() || (mask.size(-2) != queries.local() && mask.size(-2) != 1))
      throw StateError(str(kName, ": its mask ", mask.sizes(), " is neither of all ", queries.total(), " x ",
                           keys.total(), " tokens nor of this rank's ", queries.local(), " x ", keys.local()));
    whole = completed(mask, queries, keys, padding_mask);
  }
  const ShardRange& own = heads[queries.rank];
  return whole.dim() >= 3 && whole.size(-3) == heads.heads && heads.heads > 1 ? whole.narrow(-3, own.begin, own.numel())
                                                                              : whole;
}

/// The heads of keys that the queries `own` of this rank attend with, one for each: `keys` has those of `range` alone.
at::Tensor one_for_each(const at::Tensor& keys, const ShardRange& range, const ShardRange& own,
                        int64_t queries_per_key) {
  const at::Tensor heads = at::arange(own.begin, own.end, keys.options().dtype(at::kLong).requires_grad(false));
  return keys.index_select(1, heads.floor_divide(queries_per_key) - range.begin);
}

}  // namespace

void take_causality(OperatorCall& call, const Cut& queries, const Cut& keys) {
  const c10::IValue given = argument(call, kMask);
  if (!given.isTensor() || !given.toTensor().defined() || queries.lengths != keys.lengths) return;
  const at::Tensor& mask = given.toTensor();
  if (mask.dim() < 2 || mask.size(-1) != keys.local() || mask.size(-2) != queries.local()) return;
  const at::Tensor local = mask.scalar_type() == at::kBool ? mask : mask.eq(0);
  if (local.logical_xor(at::ones_like(local).tril()).any().item<bool>()) return;
  argument(call, kMask) = c10::IValue();
  argument(call, kIsCausal) = true;
}

void run_by_heads(OperatorCall& call, Next next, const Cut& queries, const Cut& keys, const at::Tensor& padding_mask,
                  Group& group) {
  const bool has_batch = argument(call, kQuery).toTensor().dim() == 4;
  const auto with_batch = [&](size_t index) {
    const at::Tensor tensor = argument(call, index).toTensor();
    return has_batch ? tensor : tensor.unsqueeze(0);
  };
  // Where there is padding, models leave the mask out on ranks whose own tokens all count, and repeat keys on the
  // others.
  const bool is_padded = padding_mask.defined();
  const int64_t heads = with_batch(kQuery).size(1);
  const auto keys_of = [&](size_t index) {
    const at::Tensor tensor = with_batch(index);
    return is_padded && tensor.size(1) != heads ? tensor.repeat_interleave(heads / tensor.size(1), 1) : tensor;
  };
  const int64_t key_heads = is_padded ? heads : with_batch(kKey).size(1);
  if (heads < group.size())
    throw StateError(str(kName, ": ", heads, " heads for ", group.size(),
                         " ranks; use at most as many ranks as heads, or ring attention"));
  const HeadRanges query_heads = HeadRanges::of_queries(heads, group.size());
  const HeadRanges of_keys = HeadRanges::of_keys(key_heads, query_heads);
  next.run(call, [&] {
    at::Tensor query = to_heads(with_batch(kQuery), query_heads, queries, group);
    at::Tensor key = to_heads(keys_of(kKey), of_keys, keys, group);
    at::Tensor value = to_heads(keys_of(kValue), of_keys, keys, group);
    const ShardRange &own = query_heads[group.rank()], &own_keys = of_keys[group.rank()];
    const int64_t queries_per_key = heads / key_heads;
    if (own.numel() != own_keys.numel() * queries_per_key) {
      key = one_for_each(key, own_keys, own, queries_per_key);
      value = one_for_each(value, own_keys, own, queries_per_key);
      argument(call, kEnableGqa) = false;
    }
    if (argument(call, kMask).isTensor() && argument(call, kMask).toTensor().defined())
      argument(call, kMask) =
          mask_for_heads(argument(call, kMask).toTensor(), queries, keys, padding_mask, query_heads);
    else if (is_padded)
      argument(call, kMask) =
          kept(padding_mask, queries, keys, std::exchange(argument(call, kIsCausal), false).toBool(), query.device());
    if (is_padded) argument(call, kEnableGqa) = false;
    argument(call, kQuery) = query;
    argument(call, kKey) = key;
    argument(call, kValue) = value;
  });
  next(call);
  const at::Tensor of_heads = call.stack.back().toTensor();
  call.stack.back() = next.run(call, [&] {
    const at::Tensor result = to_tokens(of_heads, query_heads, queries, group);
    return has_batch ? result : result.squeeze(0);
  });
}

}  // namespace trireme::sequence
