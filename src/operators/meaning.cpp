// The meaning of an operator for tensors of one shape, whatever that is: read off the row of such a call.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "trireme/operators/row.h"
#include "trireme/operators/rules.h"

namespace trireme {
namespace {

bool is_tensor(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : argument.type())->isSubtypeOf(*c10::TensorType::get());
}

/// The row of a call that names no dim.
Row row_of_one_shape(const c10::OperatorHandle& op, const OperatorRow& entry) {
  std::vector<c10::IValue> arguments;
  std::vector<std::vector<int64_t>> sizes;
  for (const c10::Argument& argument : op.schema().arguments()) {
    arguments.push_back(is_tensor(argument) ? c10::IValue(at::Tensor()) : c10::IValue());
    if (is_tensor(argument)) sizes.push_back({2, 3});
  }
  return entry.row(RowCall(op, arguments, std::move(sizes)));
}

}  // namespace

OperatorMeaning meaning_of(const c10::OperatorHandle& op) {
  const OperatorRow* const entry = row_of(op);
  const OperatorRule* const rule = rule_of(op);
  OperatorMeaning meaning;
  meaning.is_alias = entry != nullptr && entry->elements == Elements::kAlias;
  meaning.reads_first = !(entry != nullptr && entry->elements == Elements::kFresh) &&
                        !(rule != nullptr && rule->role == OperatorRole::kNew);
  // Plain arguments decide over what other families mean.
  const bool is_each = entry != nullptr && entry->is_each(), is_reduction = entry != nullptr && entry->is_reduction();
  if ((!is_each && !is_reduction) || op.schema().returns().size() != 1) return meaning;
  const Row row = row_of_one_shape(op, *entry);
  const auto is_of = [&](FactorKind kind) {
    return std::ranges::all_of(row.factors, [&](const Factor& factor) { return factor.kind == kind; });
  };
  meaning.is_each =
      !op.hasTag(at::Tag::nondeterministic_seeded) && is_of(FactorKind::kEach) &&
      std::ranges::all_of(row.arguments, [&](const TensorFactors& dims) { return dims == row.results[0]; });
  if (is_reduction && row.results[0].empty() && is_of(row.factors[0].kind)) meaning.reduction = row.factors[0].kind;
  return meaning;
}

}  // namespace trireme
