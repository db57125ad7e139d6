#include "pager/weights/flat_buffers.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace trireme {
namespace {

constexpr int64_t kSlabAlignment = 512;  // as libtorch's allocators have it

}  // namespace

bool registers_buffers(const StoreContext& context) {
  if (!context.policy.register_buffers || context.meshes.size() > 1) return false;
  Group& group = context.meshes.front().shards;
  return group.size() > 1 && group.buffer_registration(context.device) != nullptr;
}

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

FlatBuffers::FlatBuffers(const StoreContext& context, int64_t bytes, Group& group) : FlatBuffers(context.device) {
  if (registers_buffers(context) && bytes > 0) slab_ = group.buffer_registration(device_)->zeros(bytes);
}

at::Tensor FlatBuffers::zeros(int64_t numel, at::ScalarType dtype) {
  if (!slab_.defined()) return at::zeros({numel}, at::TensorOptions().dtype(dtype).device(device_));
  const int64_t begin = used_bytes_;
  used_bytes_ += bytes_in_slab(numel, dtype);
  return buffer_in_slab(slab_, begin, numel, dtype);
}

AlternatingBuffers::AlternatingBuffers(Group& group, c10::Device device, int64_t bytes) : bytes_(bytes) {
  if (bytes > 0) slab_ = group.buffer_registration(device)->zeros(2 * bytes);
}

at::Tensor AlternatingBuffers::next(int64_t numel, at::ScalarType dtype) {
  turn_ = 1 - turn_;
  return buffer_in_slab(slab_, turn_ * bytes_, numel, dtype);
}

}  // namespace trireme
