// Which operators cost too much to run twice.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

namespace trireme::detail {

enum class OperatorCost : uint8_t {
  kCheap,    ///< pointwise, norms, reductions, copies
  kProduct,  ///< a matrix product whose multiply-adds are known
  kCostly,   ///< attention, convolutions, …; what must not run twice, and what we know nothing of
};

/// By full name ("aten::linear").
OperatorCost cost_of(std::string_view name);

/// The left factor of a product, from its arguments.
const at::Tensor& left_factor(std::string_view name, c10::ArrayRef<c10::IValue> arguments);

}  // namespace trireme::detail
