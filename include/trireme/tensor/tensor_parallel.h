// Tensor parallelism: each rank of a group has slices of a model's matrices, with any model, unmodified.
//
//   trireme::TensorParallel parallel(group);
//   parallel.add(weight, parts);              // `weight` has this rank's part of parts[0].shape
//   auto loss = model(batch);                 // of all slices, on every rank
//
// The main idea: a tensor is whole on every rank, or one of its dims is cut over the ranks. Which it is follows from
// the arguments of the operator that computes it. A product over a dim that is cut is a partial sum, which
// ranks all-reduce; where a whole tensor meets slices, its gradient is all-reduced. An operator whose result on slices
// is not known runs on whole tensors, which are gathered; one without a row in trireme/operators is refused.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/activations/cut_activations.h"
#include "trireme/base/tensor_part.h"
#include "trireme/comm/group.h"

namespace trireme {

class AxisPass;
struct PassAxis;

/// While it lives, models of this thread compute on slices of the parameters that add() was given. Construct and
/// destroy on the same thread; graphs run backward meanwhile.
///
/// The gradient of a whole parameter is whole and the same on every rank; that of a slice is the slice's, also where
/// other ranks have some of its elements too.
///
/// Requires  ranks of the group run the same operators on the same inputs, with the same random numbers.
/// Cost      a linear layer cut by outputs and the next by inputs: one all-reduce of activations in forward, one in
///           backward. Cross entropy over a vocabulary that is cut: three numbers for each token.
/// Throws    from an operator, StateError with the operator and the fix: nothing is known of it, and it has an argument
///           that is cut; it writes into a copy of other ranks' elements.
/// Source    Megatron-LM, arXiv:1909.08053. Test: tensor_pass_test.cpp.
class [[nodiscard]] TensorParallel final : public CutActivations {
 public:
  explicit TensorParallel(Group& group);
  /// As the axis of this number of a pass over several.
  TensorParallel(std::shared_ptr<AxisPass> pass, int axis);
  static PassAxis axis(Group& group, int number);
  ~TensorParallel() override;
  TensorParallel(const TensorParallel&) = delete;
  TensorParallel& operator=(const TensorParallel&) = delete;

  /// Declares that `parameter` is this rank's slice: `parts[rank]`, one for each rank. `gathers_output`: outputs of its
  /// layer are gathered. Errors call it `name`.
  ///
  /// Throws    ShapeError: `parameter` is not of that part.
  void add(const at::Tensor& parameter, const std::vector<TensorPart>& parts, bool gathers_output = false,
           const std::string& name = {});

  /// From now on a tensor that is cut says the whole's sizes where a program reads them, in C++ too, and in backward:
  /// it is a PartTensor. A parameter says those of its slice (PlainSlices), which a program's own function may take,
  /// too. Sizes and indices mean whole tensors.
  ///
  /// Throws    StateError: parameters have been added.
  void give_parts();
  /// Megatron's sequence parallelism, from now on: the output of a row-parallel layer is reduce-scattered over tokens
  /// (the dim before the last); norms, dropout and residuals run on this rank's tokens; the next column-parallel layer
  /// gathers them. Sends as many bytes as without.
  ///
  /// Requires  give_parts(): a program that reads the sizes of a part would take its tokens for
  ///           all. Refused.
  /// Source    Korthikanti et al., arXiv:2205.05198.
  void shard_tokens();
  /// From now on the all-reduce of a large product is split by rows into two to four pieces of 256 KiB or more, each
  /// exchanged while the next one is computed. The same bytes in more calls; faster where communication runs beside
  /// computation. Not with shard_tokens(), which reduce-scatters.
  void overlap_sums();
  void begin_forward() override;
  bool is_part(const at::Tensor& tensor) override;
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor) override;
  /// The whole of `tensor`, which may be a slice; differentiable. Collective where it is one.
  at::Tensor gather(const at::Tensor& tensor);
  /// Whole; where tokens are sharded, this rank's part.
  SentTensor sent(const at::Tensor& tensor) override;
  at::Tensor taken(const at::Tensor& tensor, const std::string& cut) override;
  at::Tensor whole(const at::Tensor& tensor) override { return gather(tensor); }
  /// The whole of `tensor`, which is cut as `slice` is, such as its gradient. Collective.
  ///
  /// Throws    StateError: `slice` is none, or of other sizes.
  at::Tensor gather_like(const at::Tensor& tensor, const at::Tensor& slice);
  at::Tensor whole_like(const at::Tensor& tensor, const at::Tensor& part) override { return gather_like(tensor, part); }
  /// The ranks that share layers.
  Group& group() const;
  /// Ends the recording of exchanges. Collective.
  std::string exchange_problem() override;
  void count_exchanges(bool counts) override;
  std::vector<ExchangeRow> exchanges() const override;
  /// To call before the backward pass of `loss`, one number, which is compared over the group (on a device only the
  /// first time). Collective then.
  ///
  /// Throws    StateError on every rank: `loss` is a slice, or differs between ranks.
  void check_loss(const at::Tensor& loss) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
