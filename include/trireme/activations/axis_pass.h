// The pass that runs operators on this rank's parts of tensors, cut over any number of axes, so that results are those
// of whole tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "trireme/activations/call_arguments.h"
#include "trireme/activations/call_key.h"
#include "trireme/activations/decide.h"
#include "trireme/activations/exchanges.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/activations/placement_table.h"
#include "trireme/intercept.h"
#include "trireme/operators/row.h"
#include "trireme/operators/rules.h"

namespace trireme {

/// An argument of an operator, or a tensor of a list among its arguments, that is cut.
struct PlacedArgument {
  size_t index;
  at::Tensor tensor;  ///< as operators get it
  std::shared_ptr<const PlacedTensor> known;
  at::Tensor part = {};  ///< the program's, a PartTensor; undefined: `tensor` is
};
using PlacedArguments = std::vector<PlacedArgument>;
/// `tensor`, of which `known` is known, as an argument.
PlacedArgument placed_argument(const at::Tensor& tensor, std::shared_ptr<const PlacedTensor> known);

/// A tensor among the arguments.
struct Operand {
  size_t index;  ///< of the argument
  at::Tensor tensor;
  const PlacedArgument* found = nullptr;  ///< null: every rank has it whole
  bool is_written = false;
};
using Operands = c10::SmallVector<Operand, 4>;

Operands operands_of(const OperatorCall& call, const PlacedArguments& found);
/// Whether results share an argument's memory. An argument that is written is a result, too, and no view.
bool gives_views(const OperatorCall& call);

/// A row that a program says. Nothing: the operator runs on whole tensors. Throws StateError: the answer is none.
using OwnRow = std::function<std::optional<Row>(const OperatorCall&, const RowCall& of_wholes, const Operands&)>;
/// The stream of random numbers for what is cut so.
RandomStream stream_of(const Placement::Cuts& cuts);

/// The placements, and facts of parts, that did not come from a decision: the same object for like ones, since
/// decisions are kept by its address. The last ones of each.
class KeptPlacements {
 public:
  explicit KeptPlacements(std::shared_ptr<PartRanks> ranks) : ranks_(std::move(ranks)) {}
  const std::shared_ptr<PartRanks>& ranks() const { return ranks_; }
  std::shared_ptr<const Placement> placement(Placement placement);
  std::shared_ptr<const PartOf> part_of(std::vector<int64_t> sizes, const std::shared_ptr<const Placement>& placement,
                                        int64_t shares);

 private:
  const std::shared_ptr<PartRanks> ranks_;
  std::vector<std::shared_ptr<const Placement>> placements_;
  std::vector<std::shared_ptr<const PartOf>> parts_;
};

class AxisPass;
class HeldRun;
class RowRun;

/// The axis's own way of some operators, beside rows.
class AxisPolicy {
 public:
  virtual ~AxisPolicy() = default;
  /// The row of an operator that the table does not know, or knows otherwise; null: it says none.
  virtual std::shared_ptr<const OwnRow> own_row(AxisPass& pass, const c10::OperatorHandle& op);
  /// Gives arguments what `call` needs of them along this axis before it runs in any way; false: it runs on wholes.
  virtual bool fit(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found);
  /// Runs `call` where its row does not say how (true: it ran), or fits its arguments to it.
  virtual bool run(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found);
  /// The ranks' sum of what `call`, whose arguments are local by now, gives; undefined: it is computed and summed.
  virtual at::Tensor summed_product(AxisPass& pass, const OperatorCall& call, Next next);
  /// The cut of a sum of which each rank is to get a part; nothing: each gets all of it.
  virtual std::optional<Cut> scattered(const AxisPass& pass, const OperatorCall& call, const at::Tensor& part);
  /// Whether a part that is written into a tensor that every rank has stays where it is, so that of it only this rank's
  /// part is right; otherwise all of it is gathered and written.
  virtual bool writes_within() const { return false; }
  /// Whether ranks add up in float64.
  virtual bool sums_in_double() const { return false; }
  /// Whether sizes that a program computes with may be those of a part, where it does not get PartTensors.
  virtual bool may_read_parts() const { return false; }
  /// The way of tensors that are cut along the axis where no factor of them can be divided.
  virtual Undivided undivided() const { return Undivided::kGather; }
  /// "tensor parallelism".
  virtual std::string name() const = 0;
  /// The fix for an operator of which nothing is known.
  virtual std::string fix_for_unknown(const c10::OperatorHandle& op) const = 0;
};

/// An axis over which tensors are cut.
struct PassAxis {
  std::shared_ptr<AxisExchanges> exchanges;
  std::unique_ptr<AxisPolicy> policy;
};

/// Runs each operator in one of three ways: on this rank's parts, and the result is cut, too; on parts, and ranks join
/// the results; on whole tensors, which are gathered. Each decision is by schemas, sizes and placements, which are
/// alike on all ranks; it is kept, so that a model's second step computes none. Along an axis of kMove tensors are cut
/// otherwise in place of being gathered, or the operator is refused.
class AxisPass : public Pass {
 public:
  /// The last axis is the innermost.
  AxisPass(PassOrder order, std::vector<PassAxis> axes);
  ~AxisPass() override;
  AxisPass(const AxisPass&) = delete;
  AxisPass& operator=(const AxisPass&) = delete;

  PassOrder order() const override { return order_; }
  void run(OperatorCall& call, Next next) override;

  /// From now on results that are cut are PartTensors: a program reads the whole's sizes, in backward too, and gives
  /// them. Tensors that it declares by add() stay as they are.
  void give_parts(bool gives_parts = true) { gives_parts_ = gives_parts; }
  void add(const at::Tensor& tensor, PlacedTensor known);
  /// Null where nothing is known of `tensor`, or on another thread than this pass's.
  std::shared_ptr<const PlacedTensor> find(const at::Tensor& tensor);
  /// Nothing: `tensor` is no part, or says the whole's sizes itself, or a backward pass runs, in which gradients are of
  /// parts.
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor);
  void forget_entered() { entered_.clear(); }

  // Parts of policies.
  /// Whether sizes that the program computes with may be those of a part.
  bool may_read_parts() const;
  const AxisGrid& grid() const { return grid_; }
  int position() const { return position_; }
  AxisExchanges& exchanges(int axis) const { return *axes_[axis].exchanges; }
  Group& group(int axis) const { return axes_[axis].exchanges->group(); }
  AxisPolicy& policy(int axis) const { return *axes_[axis].policy; }
  /// This rank's cut of a part along an axis; null: it is not cut along it.
  const Cut* cut_of(const PlacedTensor& known, int axis) const;
  /// `known`, cut by `cut` along its axis in place of what it was.
  PlacedTensor with_cut(const PlacedTensor& known, const Cut& cut);
  KeptPlacements& kept() { return kept_; }
  /// From now on `tensor`, which every rank has, is right at its part alone.
  void hold_within(const at::Tensor& tensor, std::shared_ptr<const Placement> placement) {
    table_.hold_within(tensor, std::move(placement));
  }
  /// PartOf::shares of what is cut so.
  int64_t shares_of(const Placement& placement) const;
  std::vector<int64_t> whole_sizes_of(const PlacedArgument& one) const;
  /// `tensor`, which every rank has, for use beside parts along an axis.
  at::Tensor enter(const at::Tensor& tensor, int axis);
  at::Tensor whole(const PlacedArgument& one);
  /// `local`, this rank's part by `placement`, as programs get it.
  at::Tensor as_part(const at::Tensor& local, const std::shared_ptr<const Placement>& placement);
  /// Runs `call` on whole tensors. One that is cut along an axis of kMove is not made whole: the operators that `call`
  /// is made of run in its place, or it is refused.
  void run_whole(OperatorCall& call, Next next, const PlacedArguments& found);
  /// Runs `call`, whose arguments are this rank's along `axis`, over the other axes that cut them.
  void run_over_others(int axis, OperatorCall& call, Next next, PlacedArguments found);
  /// `axis`: that of the rank that the text names; -1: the first that cuts `tensor`.
  [[noreturn]] void refuse(const OperatorCall& call, const at::Tensor& tensor, const std::string& reason,
                           const std::string& fix, int axis = -1);

 private:
  using WrittenCopies = std::vector<std::pair<at::Tensor, std::shared_ptr<const CopyOf>>>;
  PlacedArguments find_arguments(OperatorCall& call, WrittenCopies& written);
  void run_placed(OperatorCall& call, Next next, PlacedArguments found, bool has_part);
  void share_elements(OperatorCall& call, Next next, PlacedArguments& found);
  void run_found(OperatorCall& call, Next next, PlacedArguments found);
  void check_count(const OperatorCall& call, size_t index, const PlacedTensor& sum) const;

  // axis_rows.cpp
  friend class HeldRun;
  friend class RowRun;
  /// The source of an operator's row: the table's entry, or the program's own row.
  struct Meaning {
    const OperatorRow* entry = nullptr;
    std::shared_ptr<const OwnRow> own = nullptr;
  };
  struct Decided;
  void run_row(OperatorCall& call, Next next, const Meaning& meaning, const PlacedArguments& found);
  /// Runs the operator on all elements, as one rank would; its results are held as its arguments are. False: it has not
  /// run.
  bool run_row_on_whole(OperatorCall& call, Next next, const Meaning& meaning, const PlacedArguments& found);

  void run_gathered(OperatorCall& call, Next next, const PlacedArguments& found);
  at::Tensor gather(const at::Tensor& part, const Cut& cut, bool enters);
  template <class Make>
  at::Tensor entered_once(const at::Tensor& tensor, int axis, const Make& make);

  /// A whole tensor that has entered, so that a second layer does not sum its gradient again.
  struct Entered {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> whole;
    uint32_t version;
    bool has_gradient;
    int axis;
    at::Tensor result;
  };

  const PassOrder order_;
  const std::vector<PassAxis> axes_;
  const std::vector<Undivided> undivided_;  // by axis
  const AxisGrid grid_;
  const int position_;
  std::string running_;  // the operator that is looked at
  const std::thread::id thread_ = std::this_thread::get_id();
  PlacementTable table_;
  PlainSlices slices_;  // of tensors that were added, where results are PartTensors
  std::unordered_map<CallKey, std::shared_ptr<Decided>, CallKey::Hash> decisions_;
  OperatorRules rules_;
  OperatorRows rows_;
  std::vector<Entered> entered_;  // the last ones
  KeptPlacements kept_;
  bool gives_parts_ = false;
  InterceptScope scope_;
};

/// The operators that `call` is made of run in its place, on parts as the program has them.
void run_opened(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments found);

}  // namespace trireme
