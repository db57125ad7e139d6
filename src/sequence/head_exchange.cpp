#include "sequence/head_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace trireme::sequence {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A block for each rank, as large as the largest: [ranks, B, heads, tokens, D].
at::Tensor blocks_for(const at::Tensor& like, const HeadRanges& heads, const TokenSplit& cut) {
  int64_t most_heads = 0;
  for (const ShardRange& range : heads.of_rank) most_heads = std::max(most_heads, range.numel());
  const int64_t most_tokens = *std::max_element(cut.lengths.begin(), cut.lengths.end());
  const auto ranks = static_cast<int64_t>(cut.lengths.size());
  return at::zeros({ranks, like.size(0), most_heads, most_tokens, like.size(3)}, like.options());
}

at::Tensor exchanged(const at::Tensor& blocks, Group& group) {
  at::Tensor received = at::empty_like(blocks);
  group.all_to_all(received, blocks).wait();
  return received;
}

at::Tensor block(const at::Tensor& blocks, int rank, int64_t heads, int64_t tokens) {
  return blocks.select(0, rank).narrow(1, 0, heads).narrow(2, 0, tokens);
}

at::Tensor exchange_to_heads(const at::Tensor& tokens, const HeadRanges& heads, const TokenSplit& cut, Group& group) {
  const at::Tensor sent = blocks_for(tokens, heads, cut);
  for (int rank = 0; rank < group.size(); ++rank)
    block(sent, rank, heads[rank].numel(), cut.local()).copy_(tokens.narrow(1, heads[rank].begin, heads[rank].numel()));
  const at::Tensor received = exchanged(sent, group);
  const int64_t own = heads[group.rank()].numel();
  at::Tensor result = at::empty({tokens.size(0), own, cut.total(), tokens.size(3)}, tokens.options());
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t length = cut.lengths[static_cast<size_t>(rank)];
    result.narrow(2, cut.before(rank), length).copy_(block(received, rank, own, length));
  }
  return result;
}

at::Tensor exchange_to_tokens(const at::Tensor& all, const HeadRanges& heads, const TokenSplit& cut, Group& group) {
  const at::Tensor sent = blocks_for(all, heads, cut);
  const int64_t own = heads[group.rank()].numel();
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t length = cut.lengths[static_cast<size_t>(rank)];
    block(sent, rank, own, length).copy_(all.narrow(2, cut.before(rank), length));
  }
  const at::Tensor received = exchanged(sent, group);
  at::Tensor result = at::zeros({all.size(0), heads.heads, cut.local(), all.size(3)}, all.options());
  for (int rank = 0; rank < group.size(); ++rank)
    result.narrow(1, heads[rank].begin, heads[rank].numel())
        .add_(block(received, rank, heads[rank].numel(), cut.local()));
  return result;
}

using Exchange = at::Tensor (*)(const at::Tensor&, const HeadRanges&, const TokenSplit&, Group&);

/// The arguments of the exchange the other way, for backward.
struct Way final : torch::CustomClassHolder {
  Way(HeadRanges heads, TokenSplit cut, Group& group, Exchange back)
      : heads(std::move(heads)), cut(std::move(cut)), group(group), back(back) {}
  HeadRanges heads;
  TokenSplit cut;
  Group& group;
  Exchange back;
};

struct ExchangeFunction : torch::autograd::Function<ExchangeFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const c10::intrusive_ptr<Way>& way,
                            Exchange there) {
    context->saved_data["way"] = c10::IValue::make_capsule(way);
    return there(x, way->heads, way->cut, way->group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto way = c10::static_intrusive_pointer_cast<Way>(context->saved_data["way"].toCapsule());
    return {way->back(gradients[0], way->heads, way->cut, way->group), {}, {}};
  }
};

}  // namespace

HeadRanges HeadRanges::of_queries(int64_t heads, int ranks) {
  HeadRanges result{.of_rank = {}, .heads = heads};
  for (int rank = 0; rank < ranks; ++rank)
    result.of_rank.push_back({.begin = heads * rank / ranks, .end = heads * (rank + 1) / ranks});
  return result;
}

HeadRanges HeadRanges::of_keys(int64_t key_heads, const HeadRanges& queries) {
  const int64_t queries_per_key = queries.heads / key_heads;
  HeadRanges result{.of_rank = {}, .heads = key_heads};
  for (const ShardRange& range : queries.of_rank)
    result.of_rank.push_back({.begin = range.begin / queries_per_key, .end = (range.end - 1) / queries_per_key + 1});
  return result;
}

at::Tensor to_heads(const at::Tensor& tokens, const HeadRanges& heads, const TokenSplit& cut, Group& group) {
  return ExchangeFunction::apply(tokens, c10::make_intrusive<Way>(heads, cut, group, &exchange_to_tokens),
                                 &exchange_to_heads);
}

at::Tensor to_tokens(const at::Tensor& heads_of_all, const HeadRanges& heads, const TokenSplit& cut, Group& group) {
  return ExchangeFunction::apply(heads_of_all, c10::make_intrusive<Way>(heads, cut, group, &exchange_to_heads),
                                 &exchange_to_tokens);
}

}  // namespace trireme::sequence
