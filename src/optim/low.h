// Updates of mode `low`: weights and states in 16 bits, every operator rounded to them as torch.optim rounds it.
#pragma once

#include <cstdint>

#include "optim/update.h"

namespace trireme {

/// As update(), in the operators and the order of torch.optim's single-tensor (and so foreach) path on 16-bit tensors.
/// The gradients have the weights' dtype; a factor other than 1 rounds them once.
///
/// Cost      about ten passes over a block that stays in the cache; three temporaries of a block.
/// Source    torch/optim/{adam,sgd,adagrad}.py, _single_tensor_*. Test: low_test.cpp.
void update_low(const UpdateSpan& span, const OptimizerOptions& optimizer, double gradient_factor, int64_t step);

}  // namespace trireme
