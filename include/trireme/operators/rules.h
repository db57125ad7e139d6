// The meaning of libtorch's operators: how an operator's result follows from its arguments, dim by dim. Written once,
// here.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace trireme {

/// How the result of an operator follows from its arguments.
enum class OperatorRole : uint8_t {
  kNone,       ///< reads no data and gives no tensor of its own (requires_grad_, is_leaf)
  kEach,       ///< element by element, with broadcasting
  kFind,       ///< element by element of one argument, each looked for in all of another
  kCopy,       ///< the same elements, perhaps of another dtype, device or stride
  kView,       ///< the same elements under other sizes or strides
  kRepeat,     ///< its argument several times
  kPart,       ///< a view of part of the dim that it names
  kReduction,  ///< over the dims that it names, or over all; dims go, or stay with size 1
  kScan,       ///< along the dims that it names; other dims are independent
  kSet,        ///< reads all elements; the result's sizes depend on values (unique, bincount)
  kCat,        ///< joins tensors along the dim that it names
  kStack,      ///< joins tensors along a new dim
  kPad,        ///< adds elements at the ends of dims
  kProduct,    ///< a matrix product
  kConvolution,
  kLookup,       ///< rows of a table; the result has further dims behind those of the indices
  kNorm,         ///< over the last dims
  kAttention,    ///< scaled_dot_product_attention
  kClassLoss,    ///< cross entropy and nll: logits over classes, a target, a reduction
  kEachLoss,     ///< element by element, then a reduction
  kIndex,        ///< index(): tensors as indices of dims
  kSelectIndex,  ///< index_select()
  kGather,
  kMaskedSelect,
  kNonzero,
  kPut,       ///< writes at indices (index_put_)
  kScatter,   ///< writes along the dim that it names, at indices
  kTriangle,  ///< by the indices in the last two dims (tril)
  kNew,       ///< a new tensor of given sizes; its argument gives only dtype and device (new_zeros)
  kRead,      ///< gives a number or a bool to the program
};

/// One row of the table.
struct OperatorRule {
  OperatorRole role;
  bool sums = false;  ///< kReduction: sum, mean, any or all, whose results ranks can combine
};

/// The cost of running an operator a second time.
enum class OperatorCost : uint8_t {
  kCheap,    ///< pointwise, norms, reductions, copies
  kProduct,  ///< a matrix product whose multiply-adds are known
  kCostly,   ///< attention, convolutions, …; operators that must not run twice, and unknown ones
};

/// The row of an operator; null if it has none. Rows are by name ("aten::max") or by overload ("aten::max.dim").
/// Those whose row of factors (row.h) is element by element are kEach without one of their own. Overloads that write
/// `out=` have no row.
const OperatorRule* rule_of(const c10::OperatorHandle& op);

/// The origin of the sizes of an operator's results.
enum class ResultSizes : uint8_t {
  kBySizes,   ///< sizes and plain arguments
  kByValues,  ///< also the values of its arguments
  kByMasks,   ///< also those of masks among its indices
};
ResultSizes result_sizes_of(const c10::OperatorHandle& op);

/// The cost of an operator, by its row, or by its name if it has none.
OperatorCost cost_of(const c10::OperatorHandle& op);

/// Index of the left factor among the arguments of a matrix product (OperatorRole::kProduct): 1 where a tensor to add
/// comes first (addmm), else 0.
size_t left_factor_index(const c10::OperatorHandle& op);

/// A cache of rule_of(), which looks names up. For one thread.
class OperatorRules {
 public:
  const OperatorRule* operator()(const c10::OperatorHandle& op) {
    if (const auto found = known_.find(op); found != known_.end()) return found->second;
    return known_.emplace(op, rule_of(op)).first->second;
  }

 private:
  std::unordered_map<c10::OperatorHandle, const OperatorRule*> known_;
};

}  // namespace trireme
