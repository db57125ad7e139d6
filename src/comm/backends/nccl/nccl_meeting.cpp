#include "comm/backends/nccl/nccl_meeting.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <chrono>

#include "comm/backends/device/device_identity.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

void refuse_ranks_on_one_device(const TransportSite& site) {
  const auto pair = ranks_on_one_device(identities_of_all(site.host, site.device));
  if (!pair) return;
  throw ConfigError(str("NCCL serves one rank per GPU, and ranks ", pair->first, " and ", pair->second, " of group '",
                        site.state.name(), "' are on one (", site.device.str(),
                        " here); give each rank a GPU of its own, or take make_cuda_ipc_group() (transport cuda_ipc), "
                        "which serves ranks that share one"));
}

}  // namespace

std::unique_ptr<Group> group_for_ids(Group& host) { return host.clone(host.name() + ".nccl"); }

NcclComm::Poll poll_peers(GroupState& state, std::chrono::milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  return [&state, timeout, start] {
    const auto what = [] { return std::string("the making of an NCCL communicator"); };
    const double elapsed_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    state.throw_if_failed();
    if (const auto lost = state.lost_peer(GroupState::Look::kProcesses, what, elapsed_s)) std::rethrow_exception(lost);
    if (std::chrono::steady_clock::now() - start > timeout)
      throw CommError(ErrorCode::kTimeout,
                      str(state.own_title(), " waited in ", what(), " of group '", state.name(), "' for ", elapsed_s,
                          " s; a rank did not come, or NCCL cannot connect to it (NCCL_DEBUG=INFO, and "
                          "NCCL_SOCKET_IFNAME for the network to use)"));
  };
}

at::Tensor bytes_of_id(ncclUniqueId& id) { return at::from_blob(&id, {static_cast<int64_t>(sizeof id)}, at::kByte); }

std::unique_ptr<NcclComm> meet_all(const NcclApi& api, const TransportSite& site) {
  refuse_ranks_on_one_device(site);
  const c10::DeviceGuard on(site.device);
  ncclUniqueId id{};
  // An id of zeros says that rank 0 could not make one, so that all ranks fail alike.
  if (site.host.rank() == 0 && api.get_unique_id(&id) != ncclSuccess) id = {};
  site.host.broadcast(bytes_of_id(id), 0).wait();
  if (bytes_of_id(id).eq(0).all().item<bool>())
    throw CommError(ErrorCode::kPeerLost,
                    "NCCL: rank 0 could not open a socket for the others to meet at (NCCL_DEBUG=INFO, and "
                    "NCCL_SOCKET_IFNAME for the network to use)");
  try {
    return std::make_unique<NcclComm>(api, id, site.state.place(), poll_peers(site.state, site.host.timeout()));
  } catch (...) {
    site.state.fail(std::current_exception());
    throw;
  }
}

}  // namespace trireme::comm
