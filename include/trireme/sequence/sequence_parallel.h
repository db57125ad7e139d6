// Sequence parallelism: each rank of a group has some of the tokens of every sequence, with any model, unmodified.
//
//   trireme::SequenceParallel parallel(group);
//   auto batch = parallel.cut({.input_ids = ids_BS, .labels = labels_BS, .position_ids = positions_BS});
//   auto loss = model(batch.input_ids, batch.position_ids, batch.labels);   // of all tokens, on every rank
//
// The main idea: of each tensor that is cut it is known how, and an operator's row says what each rank computes of its
// part (activations/axis_pass.h). A program reads the whole's sizes. Attention runs on all tokens of some of the heads
// (Ulysses), or receives the other ranks' keys and values one after the other (ring). A loss is that of all tokens. An
// operator that mixes tokens moves them to another dim and back, or is refused.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/activations/cut_activations.h"
#include "trireme/comm/group.h"

namespace trireme {

class AxisPass;
struct PassAxis;

/// How attention runs on sequences that are cut.
enum class SequenceAttention : uint8_t {
  kUlysses,  ///< all-to-all between tokens and heads; at least as many heads as ranks
  kRing,     ///< keys and values go round; any number of heads, no dropout inside attention
};

/// A micro-batch to cut. Undefined tensors are left out; tokens run along `dim` of each.
struct SequenceInputs {
  at::Tensor input_ids = {};       ///< [B, S]
  at::Tensor labels = {};          ///< [B, S], not shifted; a shift by one takes the next rank's first label
  at::Tensor position_ids = {};    ///< [B, S] or [1, S]
  at::Tensor attention_mask = {};  ///< [B, S]: 1 for tokens, 0 for padding
  int64_t dim = 1;
};

/// The range of a sequence of `tokens` tokens that rank `rank` of `size` has: lengths differ by at most one.
ShardRange sequence_range(int64_t tokens, int size, int rank);

/// While it lives, models of this thread compute on tensors from cut() as on whole sequences; others are not affected.
/// Construct and destroy on the same thread; graphs run backward meanwhile.
///
/// The loss is the same on every rank. A rank's gradients of parameters are those of the sum of all ranks' losses
/// through this rank's tokens, so their mean over the group is the gradient. Mean losses leave ignored targets of all
/// ranks out.
///
/// Requires  ranks of the group get the same batches and run the same operators.
/// Cost      per attention, forward: kUlysses four all-to-alls (query, key, value, result); kRing size - 1 messages of
///           keys and values; backward the same of gradients. A loss: one number.
/// Throws    from an operator, StateError with the operator and the fix: the result for tokens that are cut is not
///           known to be right.
/// Source    DeepSpeed-Ulysses, arXiv:2309.14509; ring attention, arXiv:2310.01889. Test: sequence_test.cpp.
class [[nodiscard]] SequenceParallel final : public CutActivations {
 public:
  explicit SequenceParallel(Group& group, SequenceAttention attention = SequenceAttention::kUlysses);
  /// As the axis of this number of a pass over several.
  SequenceParallel(std::shared_ptr<AxisPass> pass, int axis);
  static PassAxis axis(Group& group, SequenceAttention attention, int number);
  ~SequenceParallel() override;
  SequenceParallel(const SequenceParallel&) = delete;
  SequenceParallel& operator=(const SequenceParallel&) = delete;

  /// A copy of `whole`, of which operators that make activations take this rank's tokens along `dim`; where `whole`
  /// asks for a gradient, these tokens. Local.
  ///
  /// Throws    ShapeError: fewer than two tokens for some rank.
  at::Tensor cut(const at::Tensor& whole, int64_t dim);
  /// cut() of each tensor, after a small all-gather that finds ranks with different batches. Collective.
  ///
  /// Throws    StateError on every rank: sizes or values differ.
  SequenceInputs cut(const SequenceInputs& whole);

  bool is_part(const at::Tensor& tensor) override;
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor) override;
  /// The whole tensor that `part` is a part of; undefined if no rank has it.
  at::Tensor whole_of(const at::Tensor& part);
  /// Whether cut() was called.
  bool has_cut() const { return has_cut_; }
  /// To call before the backward pass of `loss`. Warns once if the program has cut no batch.
  ///
  /// Throws    StateError: the loss is of this rank's tokens alone, so gradients would be wrong.
  void check_loss(const at::Tensor& loss) override;
  /// This rank's tokens travel as they are; what is known whole, as positions are, travels whole and is cut again.
  ///
  /// Throws    StateError: it is right at this rank's tokens alone.
  SentTensor sent(const at::Tensor& tensor) override;
  at::Tensor taken(const at::Tensor& tensor, const std::string& cut) override;
  /// Cost      an all-gather of the tokens, as many from each rank as the longest part has.
  at::Tensor whole(const at::Tensor& tensor) override;
  void count_exchanges(bool counts) override;
  std::vector<ExchangeRow> exchanges() const override;

 private:
  const std::shared_ptr<AxisPass> pass_;
  const int axis_;
  bool has_cut_ = false, told_uncut_ = false;
};

}  // namespace trireme
