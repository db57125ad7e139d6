// Operators on rows, noted down to be computed for some of the rows at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "recompute/surroundings.h"
#include "trireme/intercept.h"

namespace trireme::detail {

class RowExpression;
using Rows = std::shared_ptr<const RowExpression>;

/// A value: row i of the result depends on row i of the leaves alone.
class RowExpression {
 public:
  using Holes = std::vector<std::pair<size_t, Rows>>;

  /// The leaf of that number itself.
  static Rows leaf(size_t index);
  /// `call`'s operator on its arguments, of which those at `holes` are expressions; under the autocast of now.
  static Rows of(const OperatorCall& call, Holes holes);
  /// Columns [begin, begin + width) of `rows`.
  static Rows columns(const Rows& rows, int64_t begin, int64_t width);

  /// Through the later part of the chain only: the call has been through the earlier one.
  at::Tensor evaluate(const std::vector<at::Tensor>& leaves) const;

  /// The tensors among the arguments, with those of the expressions below.
  const std::vector<at::Tensor>& captured() const { return captured_; }
  /// How many operators it has.
  int size() const { return size_; }

 private:
  using Results = std::map<const RowExpression*, at::Tensor>;
  at::Tensor evaluate(const std::vector<at::Tensor>& leaves, Results& results) const;

  size_t leaf_ = 0;
  std::optional<c10::OperatorHandle> op_;  // none: a leaf
  std::vector<c10::IValue> arguments_;
  Holes holes_;
  std::vector<at::Tensor> captured_;
  std::optional<Surroundings> surroundings_;
  RandomStream stream_ = RandomStream::kModel;
  int size_ = 0;
};

}  // namespace trireme::detail
