// Tensor parallelism: each rank of a group has slices of a model's matrices, with any model, unmodified.
//
//   trireme::TensorParallel parallel(group);
//   parallel.add(weight, parts);              // `weight` has this rank's part of parts[0].shape
//   auto loss = model(batch);                 // of all slices, on every rank
//
// The main idea: a tensor is whole on every rank, or one of its dims is cut over the ranks. Which it is follows from
// the arguments of the operator that computes it. A product over a dim that is cut is a part of a sum, which the ranks
// add up; a whole tensor that meets slices is entered, so that its gradient is summed over the ranks. What is not known
// of slices runs on whole tensors, which are gathered; an operator without a row in trireme/operators is refused.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/tensor_part.h"
#include "trireme/comm/group.h"

namespace trireme {

/// Models of this thread compute on slices of the parameters that add() got while it lives. Construct and destroy on
/// the same thread; graphs run backward meanwhile.
///
/// Gradients of whole parameters are whole and the same on every rank; those of slices are of their own elements, also
/// where other ranks have some of them, too.
///
/// Requires  ranks of the group run the same operators on the same inputs, with the same random numbers.
/// Cost      a linear layer cut by outputs and the next by inputs: one all-reduce of activations in forward, one in
///           backward. Cross entropy over a vocabulary that is cut: three numbers for each token.
/// Throws    from an operator, StateError with the operator and the fix: nothing is known of it, and it has an argument
///           that is cut; it writes into a copy of other ranks' elements.
/// Source    Megatron-LM, arXiv:1909.08053. Test: tensor_pass_test.cpp.
class [[nodiscard]] TensorParallel {
 public:
  explicit TensorParallel(Group& group);
  ~TensorParallel();
  TensorParallel(const TensorParallel&) = delete;
  TensorParallel& operator=(const TensorParallel&) = delete;

  /// `parameter` is this rank's of `parts`, one for each rank. `gathers_output`: outputs of its layer are whole.
  /// Texts call it `name`.
  ///
  /// Throws    ShapeError: `parameter` is not of that part.
  void add(const at::Tensor& parameter, const std::vector<TensorPart>& parts, bool gathers_output = false,
           const std::string& name = {});

  /// From now on sizes and places that operators get are of whole tensors: a program that reads whole_sizes() for the
  /// sizes of a part computes on wholes, and never sees what a rank has. Otherwise they may be of either.
  void speak_of_wholes();
  /// From now on the sum of a layer cut by inputs leaves each rank some of its tokens, of the dim before the last:
  /// norms, dropout and residuals between layers run on these. The next layer cut by outputs gathers them. As many
  /// bytes as without.
  ///
  /// Requires  speak_of_wholes(): a program that reads the sizes of a part would take its tokens for all. Refused.
  /// Source    Korthikanti et al., arXiv:2205.05198.
  void shard_tokens();
  /// From now on the sum of a large product (two pieces of 256 KiB or more, up to four) is exchanged by pieces of its
  /// rows, each while the next one is computed. The same bytes in more calls; it pays where ranks communicate beside
  /// their computation. Not with shard_tokens(), whose sums are reduce-scatters.
  void overlap_sums();
  /// Whether only the ranks together have `tensor`.
  bool is_part(const at::Tensor& tensor);
  /// The sizes of the whole that `tensor` is a slice of. Nothing: it is none, or a graph runs backward.
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor);
  /// The whole of `tensor`, which may be a slice; differentiable. Collective where it is one.
  at::Tensor gather(const at::Tensor& tensor);
  /// The whole of `tensor`, which is cut as `slice` is, such as its gradient. Collective.
  ///
  /// Throws    StateError: `slice` is none, or of other sizes.
  at::Tensor gather_like(const at::Tensor& tensor, const at::Tensor& slice);
  /// The first of `values` that is another one on another rank of the group, or where they are more there; nothing: all
  /// ranks have the same. Collective.
  std::optional<size_t> first_difference(const std::vector<int64_t>& values);
  /// The first exchange so far whose result is not that of all ranks' parts, with its operator; "" where all are right.
  /// From now on none is recorded. Collective.
  std::string exchange_problem();
  /// Before the backward pass of `loss`, a number, which is compared over the group: on a device the first one alone.
  /// Collective then.
  ///
  /// Throws    StateError on every rank: it is a slice, or another number on another rank.
  void check_loss(const at::Tensor& loss);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
