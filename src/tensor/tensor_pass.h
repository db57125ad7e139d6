// The pass that runs operators on this rank's slices, so that results are those of whole tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "activations/exchanges.h"
#include "tensor/cut_table.h"
#include "tensor/rule_table.h"
#include "trireme/activations/call_arguments.h"
#include "trireme/activations/call_key.h"
#include "trireme/activations/decide.h"
#include "trireme/comm/group.h"
#include "trireme/intercept.h"
#include "trireme/operators/row.h"
#include "trireme/operators/rules.h"

namespace trireme::tensor {

/// An argument of an operator, or a tensor of a list among its arguments, that is cut.
struct CutArgument {
  size_t index;
  at::Tensor tensor;
  Cut cut;
  bool gathers_output = false;
  bool is_parameter = false;

  int64_t from_right() const { return tensor.dim() - cut.dim; }  ///< as broadcasting counts dims
};
using CutArguments = std::vector<CutArgument>;

/// Handlers by an operator's role. Each runs the operator in one of three ways: on this rank's slices, and the result
/// is cut, too; on slices, and ranks add the results up; on whole tensors, which are gathered. Each decision is by
/// schemas and shapes, which are alike on all ranks.
class TensorPass : public Pass {
 public:
  explicit TensorPass(Group& group);
  ~TensorPass() override;
  TensorPass(const TensorPass&) = delete;
  TensorPass& operator=(const TensorPass&) = delete;

  PassOrder order() const override { return PassOrder::kTensor; }
  void run(OperatorCall& call, Next next) override;

  void add(const at::Tensor& tensor, CutTensor known) { table_.add(tensor, std::move(known)); }
  /// Nothing where `tensor` is not cut, or on another thread than this pass's.
  std::optional<CutTensor> find(const at::Tensor& tensor) {
    return std::this_thread::get_id() == thread_ ? table_.find(tensor) : std::nullopt;
  }
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor);
  void speak_of_wholes() { speaks_of_wholes_ = true; }
  void shard_tokens() { shards_tokens_ = true; }
  void overlap_sums() { overlaps_sums_ = true; }
  void forget_entered() { entered_.clear(); }
  const std::shared_ptr<AxisExchanges>& exchanges() const { return exchanges_; }

 private:
  CutArguments find_arguments(const OperatorCall& call);
  void run_found(OperatorCall& call, Next next, CutArguments found);
  void run_without_rule(OperatorCall& call, Next next, const CutArguments& found);
  void run_whole(OperatorCall& call, Next next, const CutArguments& found);

  // by_row.cpp
  /// A tensor among the arguments.
  struct Operand {
    size_t index;  ///< of the argument
    at::Tensor tensor;
    const CutArgument* found = nullptr;  ///< null: every rank has it whole
    bool is_written = false;
  };
  using Operands = c10::SmallVector<Operand, 4>;
  Operands operands_of(const OperatorCall& call, const CutArguments& found) const;
  /// What says what an operator does with dims: the table's entry, or a rule of the program's.
  struct Meaning {
    const OperatorRow* entry = nullptr;
    std::shared_ptr<const PartitionRule> registered = nullptr;
  };
  std::optional<Row> row_for(const OperatorCall& call, const Meaning& meaning, const RowCall& of_wholes,
                             const Operands& operands, const CutArgument& lead);
  std::optional<Row> registered_row(const OperatorCall& call, const PartitionRule& rule, const RowCall& of_wholes,
                                    const Operands& operands, const CutArgument& lead);
  void run_row(OperatorCall& call, Next next, const Meaning& meaning, const CutArguments& found);
  struct Decided;
  CallKey key_of(const OperatorCall& call, const Operands& operands, bool asks_gradient) const;
  std::shared_ptr<Decided> decided(const OperatorCall& call, const Meaning& meaning, const Operands& operands,
                                   const CutArgument& lead);
  void decide_on(Decided& made, const OperatorCall& call, const Meaning& meaning, const Operands& operands,
                 const CutArgument& lead, bool asks_gradient);
  at::Tensor localise(OperatorCall& call, const Meaning& meaning, const Operands& operands, Decided& made,
                      LocalCall& here);
  at::Tensor summed_by_pieces(const OperatorCall& call, Next next, const Decision& decision);
  void finish(OperatorCall& call, Next next, const LocalCall& here, const Operands& operands, const Decided& made,
              bool joins, const at::Tensor& added);

  // meant_sizes.cpp
  bool mean_wholes(OperatorCall& call, const CutArgument& one) const;
  void run_part(OperatorCall& call, Next next, const CutArguments& found);
  struct Sized {
    std::vector<int64_t> whole;
    Cut cut;
  };
  std::optional<Sized> sized(const CutArgument& one, const std::vector<int64_t>& asked) const;
  std::optional<std::vector<Interval>> pieces_of(const OperatorCall& call, const CutArgument& one) const;
  Interval piece_of_whole(const OperatorCall& call, const CutArgument& one, const Interval& asked);

  // products.cpp
  bool fit_heads(OperatorCall& call, Next next, CutArguments& found);
  void run_class_loss(OperatorCall& call, Next next, const CutArguments& found);
  at::Tensor sum_by_pieces(const at::Tensor& left, const at::Tensor& right, bool is_weight, int64_t rows,
                           const OperatorCall& call);
  at::Tensor heads_by_query(const OperatorCall& call, const at::Tensor& keys, const CutArgument* known,
                            const CutArgument& query);

  // Helpers of the handlers.
  /// Whether sizes and places among the arguments are whole ones.
  bool takes_wholes() const { return speaks_of_wholes_; }
  std::vector<int64_t> whole_sizes_of(const CutArgument& one) const;
  Cut cut_along(const Cut& like, int64_t dim) const { return {.dim = dim, .outer = like.outer, .ranges = like.ranges}; }
  /// The sum of the ranks' `part`, or this rank's tokens of it: the dim before the last, where tokens are sharded.
  struct Sum {
    at::Tensor tensor;
    std::optional<Cut> cut;
  };
  Sum sum(const at::Tensor& part, const OperatorCall& call);
  Sum join_ranks(const at::Tensor& part, const Decision::Join& join, const OperatorCall& call);
  void note_count(const at::Tensor& sum, const Decision& decision);
  at::Tensor term_beside(const OperatorCall& call, const at::Tensor& term, const at::Tensor& sum,
                         const std::optional<Cut>& cut);
  at::Tensor placed(const Operand& one, const Placement::Cuts& wanted, bool enters);
  /// `tensor`, which every rank has, for use beside slices.
  at::Tensor enter(const at::Tensor& tensor);
  template <class Make>
  at::Tensor entered_once(const at::Tensor& tensor, const Make& make);
  /// This rank's slice of `tensor`, which every rank has.
  at::Tensor take(const at::Tensor& tensor, const Cut& cut);
  /// This rank's slice by `cut` of a tensor that is cut otherwise along the same dim.
  at::Tensor recut(const CutArgument& one, const Cut& cut);
  at::Tensor whole(const CutArgument& one);
  /// The whole of `one` for use beside slices.
  at::Tensor enter_whole(const CutArgument& one);
  /// `tensor` for use beside a slice that is cut along its dim `from_right`, counted from the right (1: the last one):
  /// cut along the same dim, or entered as a whole.
  at::Tensor beside(const OperatorCall& call, const at::Tensor& tensor, int64_t from_right, const CutArgument& lead);
  void add_cut(const at::Tensor& tensor, Cut cut) {
    if (tensor.defined()) table_.add(tensor, {.cut = std::move(cut)});
  }
  template <class DimOf>
  void add_results(const OperatorCall& call, const Cut& like, const DimOf& dim_of) {
    for_each_tensor(call.results(), [&](const at::Tensor& result) {
      if (result.defined()) add_cut(result, cut_along(like, dim_of(result)));
    });
  }
  void check_count(const OperatorCall& call, size_t index, const CutTensor& sum) const;
  std::string name_of(const OperatorCall& call) const;
  [[noreturn]] void refuse_results(const OperatorCall& call, const at::Tensor& lead, const std::string& what);
  [[noreturn]] void refuse(const OperatorCall& call, const at::Tensor& tensor, const std::string& reason,
                           const std::string& fix);

  /// A whole tensor that has entered, so that a second layer does not sum its gradient again.
  struct Entered {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> whole;
    uint32_t version;
    bool has_gradient;
    at::Tensor result;
  };

  Group& group_;
  const AxisGrid grid_;
  const std::shared_ptr<AxisExchanges> exchanges_;
  std::string running_;  // the operator that is looked at
  const std::thread::id thread_ = std::this_thread::get_id();
  CutTable table_;
  std::unordered_map<CallKey, std::shared_ptr<Decided>, CallKey::Hash> decisions_;
  OperatorRules rules_;
  OperatorRows rows_;
  RegisteredRules registered_;
  std::vector<Entered> entered_;  // the last ones
  bool speaks_of_wholes_ = false;
  bool shards_tokens_ = false;
  bool overlaps_sums_ = false;
  InterceptScope scope_;
};

}  // namespace trireme::tensor
