#include "ownership/wire.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace trireme::ownership {
namespace {

/// How the memory of a tensor is walked so that each element comes once, in order of memory.
struct Walk {
  std::vector<int64_t> sizes, strides;
  int64_t extent = 1;  ///< elements from the first to the last

  explicit Walk(const at::Tensor& tensor) {
    std::vector<int64_t> dims(tensor.dim());
    std::iota(dims.begin(), dims.end(), 0);
    std::stable_sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
    for (const int64_t dim : dims) {
      if (tensor.size(dim) == 1 || (tensor.stride(dim) == 0 && tensor.size(dim) > 0)) continue;
      sizes.push_back(tensor.size(dim));
      strides.push_back(tensor.stride(dim));
      extent += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    if (tensor.numel() == 0) extent = 0;
    int64_t inner = 1;  // elements from the first to the last of the inner dims
    bool overlaps = false;
    for (size_t i = sizes.size(); i-- > 0; inner += (sizes[i] - 1) * strides[i]) overlaps = overlaps || strides[i] < inner;
    if (!overlaps) return;
    sizes = {extent};
    strides = {1};
  }
};

/// `tensor` without its lazy bits: its memory.
at::Tensor physical(const at::Tensor& tensor) {
  at::Tensor result = tensor.is_conj() ? tensor.conj() : tensor;
  return result.is_neg() ? result._neg_view() : result;
}

/// Elements after which memory is aligned again: the bits of a product may depend on it.
int64_t alignment_of(const at::Tensor& tensor) {
  constexpr int64_t kBytes = 64;  // of what libtorch allocates
  return std::max<int64_t>(1, kBytes / static_cast<int64_t>(tensor.element_size()));
}

}  // namespace

at::Tensor packed(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  if (tensor.numel() == 0) return at::empty({0}, tensor.options().requires_grad(false));
  const at::Tensor memory = physical(tensor.detach());
  const Walk walk(memory);
  return memory.as_strided(walk.sizes, walk.strides).clone(at::MemoryFormat::Contiguous).view(-1);
}

Room make_room(const at::Tensor& like) {
  const at::NoGradGuard no_grad;
  const Walk walk(like);
  const auto options = at::TensorOptions().dtype(like.scalar_type()).device(like.device());
  const int64_t offset = like.storage_offset() % alignment_of(like);
  const at::Tensor memory = at::empty({offset + walk.extent}, options).slice(0, offset);
  Room room;
  room.tensor = memory.as_strided(like.sizes(), like.strides(), offset);
  if (like.is_neg()) room.tensor = room.tensor._neg_view();
  if (like.is_conj()) room.tensor = room.tensor.conj();
  if (like.numel() == 0) {
    room.buffer = memory.view(-1);
    return room;
  }
  room.elements = memory.as_strided(walk.sizes, walk.strides, offset);
  room.buffer = room.elements.is_contiguous() ? room.elements.view(-1) : at::empty({room.elements.numel()}, options);
  return room;
}

at::Tensor filled(const Room& room) {
  const at::NoGradGuard no_grad;
  if (room.elements.defined() && !room.elements.is_alias_of(room.buffer))
    room.elements.copy_(room.buffer.view(room.elements.sizes()));
  return room.tensor;
}

}  // namespace trireme::ownership
