#include "pager/weights/flat_buffers.h"

#include <ATen/ops/zeros.h>

namespace trireme {
bool registers_buffers(const StoreContext& context) {
  if (!context.policy.register_buffers || context.meshes.size() > 1) return false;
  Group& group = context.meshes.front().shards;
  return group.size() > 1 && group.buffer_registration(context.device) != nullptr;
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
