#include "ownership/wire.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::ownership {
namespace {

/// How the memory of a tensor is walked so that each element comes once, in order of memory.
struct Walk {
  std::vector<int64_t> sizes, strides;
  int64_t extent = 1;  ///< elements from the first to the last

  Walk(at::IntArrayRef of_sizes, at::IntArrayRef of_strides) {
    std::vector<int64_t> dims(of_sizes.size());
    std::iota(dims.begin(), dims.end(), 0);
    std::ranges::stable_sort(dims, std::greater(), [&](int64_t dim) { return of_strides[dim]; });
    for (const int64_t dim : dims) {
      if (of_sizes[dim] == 1 || (of_strides[dim] == 0 && of_sizes[dim] > 0)) continue;
      sizes.push_back(of_sizes[dim]);
      strides.push_back(of_strides[dim]);
      extent += (of_sizes[dim] - 1) * of_strides[dim];
    }
    if (c10::multiply_integers(of_sizes) == 0) {
      sizes = {0};
      strides = {1};
      extent = 0;
    }
    int64_t inner = 1;  // elements from the first to the last of the inner dims
    bool overlaps = false;
    for (size_t i = sizes.size(); i-- > 0; inner += (sizes[i] - 1) * strides[i])
      overlaps = overlaps || strides[i] < inner;
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

/// The tensor of `layout` whose first element is that of `memory`.
at::Tensor over(const at::Tensor& memory, const Layout& layout) {
  at::Tensor tensor = memory.as_strided(layout.sizes, layout.strides);
  if (layout.is_negated) tensor = tensor._neg_view();
  return layout.is_conjugated ? tensor.conj() : tensor;
}

}  // namespace

at::Tensor packed(const at::Tensor& tensor, bool in_order) {
  const at::NoGradGuard no_grad;
  at::Tensor memory = physical(tensor.detach());
  if (in_order) memory = memory.contiguous();
  const Walk walk(memory.sizes(), memory.strides());
  return memory.as_strided(walk.sizes, walk.strides).clone(at::MemoryFormat::Contiguous).view(-1);
}

Room make_room(const at::Tensor& like, bool in_order) {
  const at::NoGradGuard no_grad;
  Layout layout = layout_of(like);
  if (in_order) {
    const c10::DimVector strides = c10::contiguous_strides(layout.sizes);
    layout.strides.assign(strides.begin(), strides.end());
  }
  const Walk walk(layout.sizes, layout.strides);
  const auto options = at::TensorOptions().dtype(layout.dtype).device(like.device());
  const int64_t offset = like.storage_offset() % alignment_of(like);
  const at::Tensor memory = at::empty({offset + walk.extent}, options).slice(0, offset);
  const at::Tensor elements = memory.as_strided(walk.sizes, walk.strides);
  return {.buffer = elements.is_contiguous() ? elements.view(-1) : at::empty({elements.numel()}, options),
          .elements = elements,
          .tensor = over(memory, layout)};
}

at::Tensor filled(const Room& room) {
  const at::NoGradGuard no_grad;
  if (!room.elements.is_alias_of(room.buffer)) room.elements.copy_(room.buffer.view(room.elements.sizes()));
  return room.tensor;
}

Layout layout_of(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided)
    throw Error(ErrorCode::kUnsupported, str("smp: a tensor or gradient of layout ", tensor.layout(), " and sizes ",
                                             tensor.sizes(), " would go to another stage; only dense ones do"));
  return {.sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .dtype = tensor.scalar_type(),
          .is_conjugated = tensor.is_conj(),
          .is_negated = tensor.is_neg()};
}

std::string told_strides(const Layout& layout) {
  const bool has_bits = layout.is_conjugated || layout.is_negated;
  if (!has_bits && at::IntArrayRef(layout.strides) == at::IntArrayRef(c10::contiguous_strides(layout.sizes))) return "";
  std::vector<int64_t> numbers = layout.strides;
  numbers.push_back(layout.is_conjugated | layout.is_negated << 1);
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t)};
}

Layout layout_from(at::IntArrayRef sizes, at::ScalarType dtype, const std::string& told) {
  const c10::DimVector contiguous = c10::contiguous_strides(sizes);
  Layout layout{.sizes = sizes.vec(), .strides = {contiguous.begin(), contiguous.end()}, .dtype = dtype};
  if (told.empty()) return layout;
  std::vector<int64_t> numbers(sizes.size() + 1);
  if (told.size() != numbers.size() * sizeof(int64_t))
    throw CommError(ErrorCode::kDiverged, str("smp: strides of another tensor came for one of sizes ", sizes));
  std::memcpy(numbers.data(), told.data(), told.size());
  layout.is_conjugated = numbers.back() & 1;
  layout.is_negated = numbers.back() & 2;
  numbers.pop_back();
  layout.strides = std::move(numbers);
  return layout;
}

int64_t packed_numel(const Layout& layout) { return c10::multiply_integers(Walk(layout.sizes, layout.strides).sizes); }

at::Tensor unpacked(const at::Tensor& elements, const Layout& layout) {
  const at::NoGradGuard no_grad;
  const Walk walk(layout.sizes, layout.strides);
  if (elements.numel() == walk.extent) return over(elements, layout);
  const at::Tensor memory = at::empty({walk.extent}, elements.options());
  memory.as_strided(walk.sizes, walk.strides).copy_(elements.view(walk.sizes));
  return over(memory, layout);
}

}  // namespace trireme::ownership
