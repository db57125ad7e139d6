// scaled_dot_product_attention over a sequence of which each rank has some tokens.
#pragma once

#include "sequence/cut_table.h"
#include "trireme/comm/group.h"
#include "trireme/intercept.h"

namespace trireme::sequence {

/// A mask of this rank's tokens that says no more than that no token sees a later one becomes `is_causal`: so models
/// write it that get positions and no mask. Where there is no padding.
void take_causality(OperatorCall& call, const Cut& queries, const Cut& keys);

/// Runs the attention `call` on all tokens of some heads: its arguments become those, and its result this rank's
/// tokens. `padding_mask` [B, S], undefined: no padding. Tensors have four dims, or three without a batch.
///
/// Throws    StateError: fewer heads than ranks, a mask that cannot be had for all tokens.
void run_by_heads(OperatorCall& call, Next next, const Cut& queries, const Cut& keys, const at::Tensor& padding_mask,
                  Group& group);

/// Computes the attention `call` while keys and values go round.
///
/// Throws    StateError: a mask, dropout, or causal attention of sequences that are cut in different ways.
void run_in_ring(OperatorCall& call, Next next, const Cut& queries, const Cut& keys, Group& group);

}  // namespace trireme::sequence
