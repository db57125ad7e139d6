// scaled_dot_product_attention over a sequence of which each rank has some tokens.
#pragma once

#include "trireme/activations/sharding.h"
#include "trireme/comm/group.h"
#include "trireme/intercept.h"

namespace trireme::sequence {

/// Runs the attention `call` on all tokens of some heads: its arguments become those, and its result this rank's
/// tokens. `mask` is of all tokens, with size 1 where it is the same for all queries; undefined: none. Tensors have
/// four dims, or three without a batch.
///
/// Throws    StateError: fewer heads than ranks.
void run_by_heads(OperatorCall& call, Next next, const TokenSplit& queries, const TokenSplit& keys,
                  const at::Tensor& mask, Group& group);

/// Computes the attention `call` while keys and values go round.
///
/// Throws    StateError: dropout, a mask other than causality, or causal attention of sequences with other lengths.
void run_in_ring(OperatorCall& call, Next next, const TokenSplit& queries, const TokenSplit& keys,
                 const at::Tensor& mask, Group& group);

}  // namespace trireme::sequence
