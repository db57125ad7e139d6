// How ranks meet in NCCL: by ids that go over a group of the host.
#pragma once

#include "comm/backends/nccl/nccl_comm.h"

#include <chrono>
#include <memory>

#include "comm/backends/device/transport.h"

namespace trireme::comm {

/// The communicator of all ranks of `site`. Collective over its host group, which learns of what goes wrong.
/// Throws    ConfigError: two ranks on one device. CommError: a rank did not come.
std::unique_ptr<NcclComm> meet_all(const NcclApi& api, const TransportSite& site);

/// A group of the same ranks that carries nothing but ids, so that they do not mix with the program's messages.
std::unique_ptr<Group> group_for_ids(Group& host);
/// `id` as a tensor over its bytes.
at::Tensor bytes_of_id(ncclUniqueId& id);

/// The poll that ends a wait for peers that NCCL knows nothing of, while a communicator is made.
NcclComm::Poll poll_peers(GroupState& state, std::chrono::milliseconds timeout);

}  // namespace trireme::comm
