#include "trireme/device/pinned_arena.h"

#include <algorithm>
#include <bit>

#include "trireme/device/device.h"

namespace trireme {

at::Tensor PinnedArena::take(int64_t numel, at::ScalarType dtype) {
  constexpr int64_t kAlign = 512;
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t room = std::max<int64_t>((bytes + kAlign - 1) / kAlign * kAlign, kAlign);
  if (!block_.defined() || used_ + room > block_.numel()) {
    const auto expected = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(expected_, 1))));
    const auto needed = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(room)));
    block_ = pinned_memory(std::max(expected, needed), at::kByte, device_);
    bytes_ += block_.numel();
    used_ = 0;
  }
  const at::Tensor piece = block_.narrow(0, used_, bytes).view(dtype);
  used_ += room;
  expected_ -= room;
  return piece;
}

}  // namespace trireme
