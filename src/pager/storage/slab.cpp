#include "pager/storage/slab.h"

#include <algorithm>

namespace trireme {
namespace {

constexpr int64_t kSlabAlignment = 512;  // as libtorch's allocators have it

}  // namespace

int64_t bytes_in_slab(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  return (bytes + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
}

int64_t bytes_of_units_in_slab(const Layout& layout, int64_t limit_bytes) {
  int64_t all = 0;
  for (const UnitLayout& unit : layout.units) all += bytes_in_slab(unit.numel(), unit.dtype);
  const auto padding = static_cast<int64_t>(layout.units.size()) * kSlabAlignment;
  return limit_bytes >= all ? all : std::min(all, limit_bytes + padding);
}

at::Tensor buffer_in_slab(const at::Tensor& slab, int64_t begin, int64_t numel, at::ScalarType dtype) {
  return slab.narrow(0, begin, numel * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

}  // namespace trireme
