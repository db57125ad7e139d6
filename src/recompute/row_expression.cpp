#include "recompute/row_expression.h"

#include <ATen/ops/narrow_ops.h>

#include <algorithm>

namespace trireme::detail {

Rows RowExpression::leaf(size_t index) {
  auto expression = std::make_shared<RowExpression>();
  expression->leaf_ = index;
  return expression;
}

Rows RowExpression::of(const OperatorCall& call, Holes holes) {
  auto expression = std::make_shared<RowExpression>();
  expression->op_ = call.op;
  expression->arguments_ = call.arguments().vec();
  for (const auto& [index, rows] : holes) {
    expression->arguments_[index] = {};
    expression->captured_.insert(expression->captured_.end(), rows->captured_.begin(), rows->captured_.end());
    expression->size_ += rows->size_;
  }
  for_each_tensor(expression->arguments_, [&](const at::Tensor& tensor) {
    if (tensor.defined()) expression->captured_.push_back(tensor);
  });
  expression->holes_ = std::move(holes);
  expression->surroundings_.emplace(expression->captured_, /*with_streams=*/false);
  expression->stream_ = call.stream;
  ++expression->size_;
  return expression;
}

Rows RowExpression::columns(const Rows& rows, int64_t begin, int64_t width) {
  static const c10::OperatorHandle narrow =
      c10::Dispatcher::singleton().findSchemaOrThrow(at::_ops::narrow::name, at::_ops::narrow::overload_name);
  auto expression = std::make_shared<RowExpression>();
  expression->op_ = narrow;
  expression->arguments_ = {c10::IValue(), int64_t{-1}, begin, width};
  expression->holes_ = {{0, rows}};
  expression->captured_ = rows->captured_;
  expression->surroundings_.emplace(std::vector<at::Tensor>{}, /*with_streams=*/false);
  expression->stream_ = rows->stream_;
  expression->size_ = rows->size_ + 1;
  return expression;
}

at::Tensor RowExpression::evaluate(const std::vector<at::Tensor>& leaves) const {
  const ChainFrom chain(PassOrder::kRecompute, stream_);
  Results results;
  return evaluate(leaves, results);
}

at::Tensor RowExpression::evaluate(const std::vector<at::Tensor>& leaves, Results& results) const {
  if (!op_) return leaves.at(leaf_);
  if (const auto found = results.find(this); found != results.end()) return found->second;
  torch::jit::Stack stack = arguments_;
  for (const auto& [index, rows] : holes_) stack[index] = rows->evaluate(leaves, results);
  const SurroundingsScope surroundings(*surroundings_, leaves, /*with_streams=*/false);
  op_->callBoxed(stack);
  return results[this] = stack.back().toTensor();
}

}  // namespace trireme::detail
