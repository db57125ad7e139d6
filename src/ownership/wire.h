// A tensor's elements on their way to another stage, where it has the same strides again: the same bits come out of an
// operator then.
#pragma once

#include <ATen/core/Tensor.h>

namespace trireme::ownership {

/// The elements that travel, contiguous; those that a stride of 0 repeats once. A copy.
at::Tensor packed(const at::Tensor& tensor);

/// Where a tensor of another one's sizes, strides and dtype is put together.
struct Room {
  at::Tensor buffer;    ///< [n], contiguous: as many elements as packed() has
  at::Tensor elements;  ///< of the tensor, in `buffer`'s order; the same memory where it can be
  at::Tensor tensor;
};
Room make_room(const at::Tensor& like);
/// The tensor, once the buffer is filled.
at::Tensor filled(const Room& room);

}  // namespace trireme::ownership
