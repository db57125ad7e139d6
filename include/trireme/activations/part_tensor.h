// A tensor of which this rank has a part. A program that looks at it sees the whole's sizes; operators never get it.
//
// The main idea: a PartTensor stands for a plain tensor, its local one, whose autograd metadata it shares. A pass over
// operators gives them local tensors and wraps their results. Every node of a graph speaks one of two languages:
// operators' nodes take and give gradients of the local sizes, a program's own functions take and give parts. A node of
// ours stands on each edge between the two.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "trireme/activations/placement.h"
#include "trireme/base/torch/nodes.h"
#include "trireme/intercept.h"

namespace trireme {

struct PartOf;

/// The other ranks, where a program's own function gives or gets gradients of whole tensors. Collective; without
/// gradients.
class PartRanks {
 public:
  virtual ~PartRanks() = default;
  /// All of `part`, or of a tensor that is right within this rank's part, on every rank; another tensor as it is. Cost:
  /// one all-gather along each axis that cuts it.
  virtual at::Tensor whole(const at::Tensor& part) = 0;
  /// The mean of the ranks' `whole` along the axes of shares that cut `placement`. Cost: one all-reduce along each.
  virtual at::Tensor mean(const at::Tensor& whole, const Placement& placement) = 0;
};

/// The facts of a part: alike on all ranks.
struct PartOf {
  std::vector<int64_t> sizes;  ///< of the whole
  Placement placement;
  bool is_of_parameter = false;  ///< computed from one alone: others are cut as it is
  /// A copy in place of a view: what is written into it would be lost.
  bool is_copy = false;
  /// The ranks of axes that cut it along which each rank counts the loss (GradientLaw::kShares): so many times too
  /// large are gradients that operators give of it. A program's are not.
  int64_t shares = 1;
  std::shared_ptr<PartRanks> ranks = nullptr;  ///< null: any; a function gives and gets gradients of parts alone
};

/// The tensor that operators and autograd's nodes get of `tensor`: this rank's part, or `tensor` itself.
at::Tensor local_of(const at::Tensor& tensor);

/// Strides of a dense whole of these sizes whose dims lie in the order of a local tensor's `strides`.
c10::SmallVector<int64_t, 5> dense_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides);

/// Whether this thread's code is a program's: interception is on, and no operator runs.
bool program_looks() noexcept;

/// Sizes, strides and element count are the whole's where a program looks, in backward too, and the local tensor's
/// elsewhere. Strides are those of a dense whole whose dims lie in the local tensor's order; whether it is contiguous
/// is the local tensor's answer. It has no memory: data_ptr(), accessors and printing throw, storage() by name.
///
/// Autograd    Hooks, retain_grad(), the gradient of a leaf, what autograd::grad() gives and what a program's own
///             function gets and returns are parts. A gradient that is whole where a part is meant is cut by the pass;
///             where a whole is meant, a part is gathered. Gradients of a function's whole results are joined.
///             grad_fn() of a part is a node of ours in front of the real one, of a leaf too. A hook of such a *node*
///             would not be called: the next backward pass refuses it. Gradients of gradients are refused.
/// Refused     by StateError: what is above; set_data() of a part with what is none, or the other way round; the
///             sizes and uses of a view's base.
/// Pass        asks has_parts() first; it calls local() again of a part that an operator has written, and gives the
///             part back as the result.
/// Python      calls its engine directly: its `inputs=` of grad() and hooks of nodes need a patch of their own.
///             Tensor.register_hook() is to call _register_hook(), not the node's.
class PartTensor final : public c10::TensorImpl {
 public:
  /// `local`, this rank's part, as a program is to see it. It is no part itself.
  static at::Tensor wrap(at::Tensor local, std::shared_ptr<const PartOf> of);
  /// Null: `tensor` is none.
  static PartTensor* of(const at::TensorBase& tensor) noexcept;
  /// The plain tensor that operators and autograd's nodes get. What has happened to the metadata of either is mended.
  at::Tensor local();
  const std::shared_ptr<const PartOf>& known() const { return of_; }
  /// Those that a program sees.
  c10::IntArrayRef strides_of_whole() const { return strides_; }

  PartTensor(at::Tensor local, std::shared_ptr<const PartOf> of, bool shares_metadata);
  ~PartTensor() override;

  // Answers to libtorch, which asks a TensorImpl.
  bool has_storage() const override { return false; }
  const c10::Storage& storage() const override;
  c10::IntArrayRef sizes_custom() const override;
  c10::IntArrayRef strides_custom() const override;
  int64_t numel_custom() const override;
  int64_t dim_custom() const override;
  c10::SymIntArrayRef sym_sizes_custom() const override;
  c10::SymIntArrayRef sym_strides_custom() const override;
  c10::SymInt sym_numel_custom() const override;
  c10::SymBool sym_is_contiguous_custom(at::MemoryFormat format) const override;
  c10::SymBool sym_is_non_overlapping_and_dense_custom() const override;
  bool is_strides_like_custom(at::MemoryFormat format) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;
  void release_resources() override;

 private:
  friend class PartHooks;
  friend bool has_parts(const OperatorCall& call, const PartRanks* ranks);
  void lay_out();
  void share();
  void forget() noexcept;
  bool speaks_of_wholes(const torch::autograd::Node& node, uint32_t output) const;
  void mend();
  void mend_written_view();
  void check_known() const;
  const NodePtr& node_for_program();

  at::Tensor local_;
  std::shared_ptr<const PartOf> of_;
  c10::SmallVector<int64_t, 5> strides_;  ///< of the whole
  int64_t numel_of_whole_ = 1;
  bool shares_ = false;
  bool is_known_ = true;  ///< otherwise it stands for the base of a view
  NodePtr heard_;         ///< the history's node, known to speak of the local sizes
  NodePtr asked_;         ///< the node in front of it
  NodePtr accumulator_;   ///< of a leaf
  at::Tensor base_;       ///< of a view, where libtorch has asked for it
};

/// Leaves that stay plain tensors of this rank's sizes, such as parameters, as long as this lives. A program's own
/// function that takes one gets it as it is, and gives its gradient as a part, or whole. A gradient of the leaf's own
/// sizes ends with libtorch's error, since nobody can tell it from one that was computed by these sizes from a whole.
/// Where ranks share elements (Ranges::overlaps()), backward throws StateError.
class PlainSlices {
 public:
  PlainSlices() = default;
  ~PlainSlices();
  PlainSlices(const PlainSlices&) = delete;
  PlainSlices& operator=(const PlainSlices&) = delete;

  /// Errors call it `name`.
  void add(const at::Tensor& leaf, PartOf of, std::string name);
};

/// Whether a part of these ranks, of any where it is null, is among the arguments. Throws StateError where parts are
/// refused by name: operators that change the sizes of their argument in place (resize_, set_, transpose_), and
/// transforms of torch.func.
bool has_parts(const OperatorCall& call, const PartRanks* ranks = nullptr);

/// The gradient of a part, as operators' nodes take it: `gradient`, a part or whole, on this rank, of `local_sizes`.
at::Tensor local_gradient(const at::Tensor& gradient, const std::shared_ptr<const PartOf>& of,
                          at::IntArrayRef local_sizes);

}  // namespace trireme
