// Activations that are cut over an axis of ranks, as an engine asks for them. Each axis that cuts some has a pass of
// its own: SequenceParallel, TensorParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/activations/exchange_table.h"

namespace trireme {

/// A tensor as it goes from one stage of a pipeline to the next.
struct SentTensor {
  at::Tensor tensor;
  std::string cut = {};  ///< how the receiver takes it, for CutActivations::taken(); empty: as it is
};

class CutActivations {
 public:
  virtual ~CutActivations() = default;

  /// Whether `tensor` is a part, of which only all ranks together have the whole.
  virtual bool is_part(const at::Tensor& tensor) = 0;
  /// The sizes of the whole that `tensor` is a part of, -1 for unknown ones. Nothing: it is not a part, or a backward
  /// pass runs, in which gradients are of parts.
  virtual std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor) = 0;
  /// To call before each forward pass whose backward pass may come after that of another one: no node is shared with
  /// it.
  virtual void begin_forward() {}
  /// To call before the backward pass of `loss`. Throws StateError: gradients would be of a part of the loss.
  virtual void check_loss(const at::Tensor& loss) = 0;
  /// `tensor` as the next stage of a pipeline gets it. Collective where that is the whole of a part. Throws StateError,
  /// on every rank of the axis: its cut cannot be told.
  virtual SentTensor sent(const at::Tensor& tensor) { return {tensor}; }
  /// The tensor of sent() on this stage, which shares its memory where it is a part. Throws CommError: `cut` is
  /// damaged.
  virtual at::Tensor taken(const at::Tensor& tensor, [[maybe_unused]] const std::string& cut) { return tensor; }
  /// The whole of which `tensor` is a part, detached where it is gathered, but with its graph where ranks share layers;
  /// a tensor that is none. Collective. Throws StateError, on every rank of the axis: it is not known how it is cut.
  virtual at::Tensor whole(const at::Tensor& tensor) { return tensor; }
  /// The whole of `tensor`, which is cut as `part` is, such as its gradient. Collective.
  virtual at::Tensor whole_like(const at::Tensor& tensor, [[maybe_unused]] const at::Tensor& part) { return tensor; }
  /// The first exchange so far whose result is wrong for the ranks' parts, with its operator; "": none is known.
  virtual std::string exchange_problem() { return {}; }
  /// From now on exchanges are counted by operator, or no longer; those so far are forgotten.
  virtual void count_exchanges([[maybe_unused]] bool counts) {}
  /// Those that are counted, of this rank.
  virtual std::vector<ExchangeRow> exchanges() const { return {}; }
};

}  // namespace trireme
