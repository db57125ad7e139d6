// NCCL for the fake device: the same functions, over joints of fake streams.
#pragma once

#include <memory>
#include <string>

#include "comm/backends/nccl/nccl_group.h"
#include "tests/support/fake_device/fake_device.h"
#include "trireme/comm/group.h"

namespace trireme::testing {

/// Whether NCCL's headers were there to build it: they come with the CUDA build of torch.
#ifdef TRIREME_HAS_NCCL
inline constexpr bool kHasFakeNccl = true;
#else
inline constexpr bool kHasFakeNccl = false;
#endif

/// A group over `device`, a fake one, whose calls go through the NCCL backend and a fake NCCL. Collective over `host`:
/// it is made over a group split from it, so that `host` may be the harness's. Sums are made in rank order.
/// Throws ConfigError (kUnsupported) without kHasFakeNccl.
std::unique_ptr<Group> make_fake_nccl_group(Group& host, c10::Device device, const NcclGroupOptions& options = {});
/// The same over a group that it takes.
std::unique_ptr<Group> make_fake_nccl_group(std::unique_ptr<Group> host, c10::Device device,
                                            const NcclGroupOptions& options = {});

/// From now on every communicator that is there reports an error in the background.
void break_fake_nccl();

}  // namespace trireme::testing
