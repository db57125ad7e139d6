// A tensor's elements on their way to another stage, where it has the same strides again: the same bits come out of an
// operator then.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::ownership {

/// The elements that travel, contiguous; those that a stride of 0 repeats once. A copy. `in_order`: all of them in the
/// order of dims, where the receiver has other strides.
at::Tensor packed(const at::Tensor& tensor, bool in_order = false);

/// Where a tensor of another one's sizes, strides and dtype is put together.
struct Room {
  at::Tensor buffer;    ///< [n], contiguous: as many elements as packed() has
  at::Tensor elements;  ///< of the tensor, in `buffer`'s order; the same memory where it can be
  at::Tensor tensor;
};
Room make_room(const at::Tensor& like, bool in_order = false);
/// The tensor, once the buffer is filled.
at::Tensor filled(const Room& room);

/// How the elements of a tensor lie in memory, where nobody but who has the tensor knows it: of a gradient.
struct Layout {
  std::vector<int64_t> sizes = {}, strides = {};
  at::ScalarType dtype = at::kFloat;
  bool is_conjugated = false, is_negated = false;
};
/// Throws    Error(kUnsupported): it has no strides, as a sparse one.
Layout layout_of(const at::Tensor& tensor);
/// The part of `layout` that a contiguous tensor of the same sizes and dtype does not have; empty: none.
std::string told_strides(const Layout& layout);
/// Throws    CommError(kDiverged): other bytes.
Layout layout_from(at::IntArrayRef sizes, at::ScalarType dtype, const std::string& told);
/// How many elements packed() has of a tensor of this layout.
int64_t packed_numel(const Layout& layout);
/// The tensor of which `elements`, of its dtype, are packed(). May keep them as its memory.
at::Tensor unpacked(const at::Tensor& elements, const Layout& layout);

}  // namespace trireme::ownership
