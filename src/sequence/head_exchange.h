// Between some tokens of all heads and all tokens of some heads.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "trireme/activations/sharding.h"
#include "trireme/comm/group.h"

namespace trireme::sequence {

/// Which heads each rank takes: with fewer key heads than query heads, ranks may share one.
struct HeadRanges {
  std::vector<ShardRange> of_rank;
  int64_t heads = 0;

  static HeadRanges of_queries(int64_t heads, int ranks);
  /// Heads of keys and values that the heads `queries` of queries attend with.
  static HeadRanges of_keys(int64_t key_heads, const HeadRanges& queries);
  const ShardRange& operator[](int rank) const { return of_rank[static_cast<size_t>(rank)]; }
};

/// Shapes    [B, heads, local tokens, D] -> [B, this rank's heads, all tokens, D]. Differentiable. One all-to-all.
at::Tensor to_heads(const at::Tensor& tokens, const HeadRanges& heads, const TokenSplit& cut, Group& group);
/// The way back; heads that several ranks have are added.
at::Tensor to_tokens(const at::Tensor& heads_of_all, const HeadRanges& heads, const TokenSplit& cut, Group& group);

}  // namespace trireme::sequence
