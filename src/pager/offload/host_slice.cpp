#include "pager/offload/host_slice.h"

namespace trireme {

HostSlice::HostSlice(const at::Tensor& on_device, PinnedArena& memory)
    : on_host_(memory.take(on_device.numel(), on_device.scalar_type())), on_device_(on_device) {
  on_host_.copy_(on_device);
  on_device_.end_write();
}

void HostSlice::send(const SideStream& side) {
  const OnStream on(side);
  on_device_.begin_write();
  at::Tensor(on_device_.memory()).copy_(on_host_, /*non_blocking=*/true);
  on_device_.end_write();
  sent_ = Event::record(side.device());
}

void HostSlice::fetch() {
  begin_use();  // behind the way there, so that nothing is still read from the host
  on_host_.copy_(on_device_.memory());
}

}  // namespace trireme
