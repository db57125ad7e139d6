// The work of an operator: the multiply-adds of matrix products, convolutions and attention, forward and backward.
//
// The main idea: what is counted are the operators that libtorch has a kernel for, as a backward pass calls them, too.
// A product's multiply-adds are the elements of its left matrix times the columns of its right one; a convolution's
// follow from its weight and the places at which it is applied. Element by element, norms and softmax count nothing.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>

#include "trireme/operators/row.h"

namespace trireme {

/// The knowledge of an operator's multiply-adds.
enum class Work : uint8_t {
  kNone,     ///< it has none, or only those of the operators that it is made of (CompositeImplicit)
  kCounted,  ///< multiply_adds() tells them
  kUnknown,  ///< it has some, or may have (an operator of the program's own), and nothing here tells how many
};

Work work_of(const c10::OperatorHandle& op);

/// The multiply-adds of a call, by its sizes alone: attention under a causal mask counts as without, padding as data.
/// 0 unless work_of() is kCounted.
///
/// Source    torch.utils.flop_counter has twice as many for the operators that it knows, but for the gradient of the
///           weight of a grouped convolution, where it has as many as without groups. Test: multiply_adds_test.cpp,
///           tests/python/flops_profiler_test.py.
int64_t multiply_adds(const RowCall& call);

}  // namespace trireme
