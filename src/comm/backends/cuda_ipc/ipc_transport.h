// Ranks that share a GPU, or whose GPUs reach each other: the fabric's algorithms, driven by streams.
//
// Each rank has two slots in memory of its GPU. In step t its stream waits until every peer is done with step t - 2,
// writes slot t mod 2, sets `posted`, waits for the `posted` of the peers whose slots it reads, reads them and sets
// `done`: what step_runner.cpp does on the host, but enqueued, so that the host never waits for a peer.
#pragma once

#include "comm/backends/cuda_ipc/cuda_api.h"

#include <atomic>
#include <memory>
#include <vector>

#include "comm/backends/cuda_ipc/ipc_flags.h"
#include "comm/backends/cuda_ipc/ipc_memory.h"
#include "comm/backends/device/transport.h"
#include "trireme/comm/cuda_ipc.h"

namespace trireme::comm {

class IpcTransport final : public DeviceTransport {
 public:
  /// Collective over `site.host`. Throws ConfigError, as make_cuda_ipc_group().
  IpcTransport(const CudaApi& api, const CudaIpcOptions& options, const TransportSite& site);
  ~IpcTransport() override;

  void collect(const Request& request) override;
  void pass(const Request& request) override;
  std::string problem() noexcept override { return ""; }
  void release() noexcept override;
  void close() noexcept override {}

 private:
  void send(const Request& request, CUstream stream);
  void receive(const Request& request, CUstream stream);
  /// The stream that is current for the device, with the device's context in force.
  CUstream stream() const;
  std::byte* slot(int rank, int64_t step) const;
  /// Where rank `from` puts what is for `to`.
  std::byte* mailbox(int from, int to, int64_t chunk) const;
  int64_t mailbox_chunks(const Request& request) const;
  void throw_if_released(const Call& call) const;

  const CudaApi& api_;
  const CudaIpcOptions options_;
  const Place place_;
  const c10::Device device_;
  const CUcontext context_;
  const IpcFlags flags_;
  const IpcMemory memory_;
  std::atomic<bool> released_{false};
  std::atomic<int64_t> next_step_{0};  // written by the one thread that calls collect()
  std::atomic<int64_t> chunks_{0};     // of all messages: no pair and direction has more
  std::vector<int64_t> sent_chunks_;   // by peer, each of the one thread that sends to it
  std::vector<int64_t> taken_chunks_;  // by peer, each of the one thread that receives from it
};

}  // namespace trireme::comm
