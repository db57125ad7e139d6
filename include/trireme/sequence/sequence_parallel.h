// Sequence parallelism: each rank of a group has some of the tokens of every sequence, with any model, unmodified.
//
//   trireme::SequenceParallel parallel(group);
//   auto batch = parallel.cut({.input_ids = ids_BS, .labels = labels_BS, .position_ids = positions_BS});
//   auto loss = model(batch.input_ids, batch.position_ids, batch.labels);   // of all tokens, on every rank
//
// The main idea: a tensor that is cut along the sequence is known by its storage, and so is whatever operators compute
// from it. Operators on single tokens run as they are. Attention runs on all tokens of some of the heads (Ulysses), or
// receives the other ranks' keys and values one after the other (ring). A loss is that of all tokens. An operator that
// mixes tokens in another way is refused.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

enum class SequenceAttention : uint8_t {
  kUlysses,  ///< all-to-all between tokens and heads; at least as many heads as ranks
  kRing,     ///< keys and values go round; any number of heads, no dropout inside attention
};

/// Undefined tensors are left out. Sequences are along `dim` of each.
struct SequenceInputs {
  at::Tensor input_ids = {};     ///< [B, S]
  at::Tensor labels = {};        ///< [B, S]: of the same positions; whoever shifts them gets the next rank's first one
  at::Tensor position_ids = {};  ///< [B, S] or [1, S]
  at::Tensor attention_mask = {};  ///< [B, S]: 1 for tokens, 0 for padding
  int64_t dim = 1;
};

/// The tokens of a sequence of `tokens` that rank `rank` of `size` has: neighbours, as equal in number as can be.
ShardRange sequence_range(int64_t tokens, int size, int rank);

/// Models of this thread compute on tensors that cut() gave while it lives; other tensors are not looked at. Construct
/// and destroy on the same thread; graphs run backward meanwhile.
///
/// The loss is the same on every rank. Gradients of parameters are of the sum of all ranks' losses, by this rank's
/// tokens: their mean over the group is the gradient. Means leave ignored targets out, wherever they are.
///
/// Requires  ranks of the group get the same batches and run the same operators.
/// Cost      per attention, forward: kUlysses four all-to-alls (query, key, value, result); kRing size - 1 messages of
///           keys and values; backward the same of gradients. A loss: one number.
/// Throws    from an operator, StateError with the operator and the fix: what it does with tokens is not known to be
///           right; it joins a cut tensor with one of as many tokens that is not cut (positions that the model makes
///           up itself); a mask that cannot be had for all tokens.
/// Source    DeepSpeed-Ulysses, arXiv:2309.14509; ring attention, arXiv:2310.01889. Test: sequence_test.cpp.
class [[nodiscard]] SequenceParallel {
 public:
  explicit SequenceParallel(Group& group, SequenceAttention attention = SequenceAttention::kUlysses);
  ~SequenceParallel();
  SequenceParallel(const SequenceParallel&) = delete;
  SequenceParallel& operator=(const SequenceParallel&) = delete;

  /// This rank's tokens of `whole`, known from now on as cut along `dim`. Local.
  ///
  /// Throws    ShapeError: fewer than two tokens for some rank.
  at::Tensor cut(const at::Tensor& whole, int64_t dim);
  /// cut() of each tensor. A small gather finds ranks that have different batches.
  ///
  /// Throws    StateError on every rank: sizes or values differ.
  SequenceInputs cut(const SequenceInputs& whole);

  /// From now on sizes and places that operators get are of whole sequences, where they are of a part's otherwise: a
  /// program that reads whole_sizes() for the sizes of a part computes on wholes, and never sees what a rank has.
  void speak_of_wholes();
  /// Whether only the ranks together have `tensor`.
  bool is_part(const at::Tensor& tensor);
  /// The sizes of the tensor of all tokens that `tensor` is a part of, -1 for those that are not known. Nothing: it is
  /// no part, or a graph runs backward, whose gradients are of parts.
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor);
  /// The tensor of all tokens that `part` is a part of; undefined where it is not known.
  at::Tensor whole_of(const at::Tensor& part);
  bool has_cut() const;
  /// Before the backward pass of `loss`. Tells once of a program that has cut no batch.
  ///
  /// Throws    StateError: the loss is of this rank's tokens alone, so gradients would be of a part of it.
  void check_loss(const at::Tensor& loss);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
