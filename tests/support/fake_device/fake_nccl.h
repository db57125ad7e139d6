// NCCL for the fake device: the same functions, over joints of fake streams.
#pragma once

#include <memory>
#include <string>

#include "comm/backends/nccl/nccl_group.h"
#include "tests/support/fake_device/fake_device.h"
#include "trireme/comm/group.h"

namespace trireme::testing {

/// A group over `device`, a fake one, whose calls go through the NCCL backend and a fake NCCL. Collective over `host`:
/// it is made over a group split from it, so that `host` may be the harness's. Sums are made in rank order.
std::unique_ptr<Group> make_fake_nccl_group(Group& host, c10::Device device, const NcclGroupOptions& options = {});
/// The same over a group that it takes.
std::unique_ptr<Group> make_fake_nccl_group(std::unique_ptr<Group> host, c10::Device device,
                                            const NcclGroupOptions& options = {});

/// The fate of registered memory. Freeing it while it is registered or used is a race of the
/// FakeRecord. A call that is registered at one end alone, on some ranks alone, or at different offsets throws.
struct FakeNcclMemory {
  int64_t registrations = 0;  ///< there are now
  int64_t registered_bytes = 0;
  int64_t all_registrations = 0;  ///< there ever were
  int64_t moved_in_place = 0;     ///< reductions and all-gathers, by rank, between memory that was registered
  int64_t copied = 0;             ///< others of them
};
FakeNcclMemory fake_nccl_memory();
/// From now on NCCL is one that cannot register memory, such as 2.18, or can again. For groups that are made
/// afterwards.
void let_fake_nccl_register(bool can);
/// From now on ncclMemAlloc() fails for more than `bytes` at once.
void limit_fake_nccl_memory(size_t bytes);

/// From now on every communicator that is there reports an error in the background.
void break_fake_nccl();

}  // namespace trireme::testing
