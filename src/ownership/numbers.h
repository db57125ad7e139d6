// All numbers of a tensor, where a program reads them by no operator.
#pragma once

#include <ATen/core/Tensor.h>

namespace trireme::ownership {

/// A copy on the host that has no home. An operator: the stage that has the numbers tells them to the others, as those
/// of item(). Inside of a scope of Ownership's, in the same place of the program on every stage.
at::Tensor numbers_of(const at::Tensor& tensor);

}  // namespace trireme::ownership
