// scaled_dot_product_attention over a sequence of which each rank has some tokens.
#pragma once

#include "trireme/activations/exchanges.h"
#include "trireme/intercept.h"

namespace trireme::sequence {

/// Positions of its arguments.
enum : size_t { kQuery, kKey, kValue, kMask, kDropout, kIsCausal, kScale, kEnableGqa };

/// Runs the attention `call` on all tokens of some heads: its arguments become those, and its result this rank's
/// tokens. `mask` is of all tokens, with size 1 where it is the same for all queries; undefined: none. Tensors have
/// four dims, or three without a batch; `queries` and `keys` cut their dim of tokens, one interval behind another by
/// rank.
///
/// Throws    StateError: fewer heads than ranks.
void run_by_heads(OperatorCall& call, Next next, const Cut& queries, const Cut& keys, const at::Tensor& mask,
                  AxisExchanges& axis);

/// Computes the attention `call` while keys and values go round.
///
/// Throws    StateError: dropout, a mask other than causality, or causal attention of sequences with other lengths.
void run_in_ring(OperatorCall& call, Next next, const Cut& queries, const Cut& keys, const at::Tensor& mask,
                 AxisExchanges& axis);

}  // namespace trireme::sequence
