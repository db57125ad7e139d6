#include "comm/backends/cuda_ipc/ipc_transport.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "comm/backends/device/device_fold.h"
#include "comm/fabric/algorithm.h"
#include "trireme/base/error.h"
#include "trireme/device/stream.h"

namespace trireme::comm {
namespace {

constexpr int kMailboxSlots = 2;
/// Beyond every value that a stream of a group that has failed can still wait for, and far from coming round.
constexpr int64_t kBeyond = 1 << 29;

/// Enqueues what an Algorithm does.
class StreamMover final : public Mover {
 public:
  StreamMover(const CudaApi& api, CUstream stream, c10::Device device, int64_t slot_bytes)
      : api_(api), stream_(stream), device_(device), slot_bytes_(slot_bytes) {}

  int64_t slot_bytes() const override { return slot_bytes_; }

  void copy(std::byte* to, const std::byte* from, int64_t bytes) const override {
    if (bytes == 0 || to == from) return;
    check_cuda(api_,
               api_.memcpy_dtod_async(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from),
                                      static_cast<size_t>(bytes), stream_),
               "cuMemcpyDtoDAsync");
  }

  void fold(const FoldKind& kind, std::byte* output, Slots sources, int64_t numel) const override {
    if (numel == 0) return;
    std::vector<at::Tensor> tensors;
    for (const std::byte* source : sources) tensors.push_back(tensor_at(source, numel, kind.input));
    fold_on_device(kind, tensor_at(output, numel, kind.output), tensors);
  }

 private:
  at::Tensor tensor_at(const std::byte* data, int64_t numel, at::ScalarType dtype) const {
    return at::for_blob(const_cast<std::byte*>(data), {numel})
        .options(at::TensorOptions().dtype(dtype).device(device_))
        .target_device(device_)
        .make_tensor();
  }

  const CudaApi& api_;
  const CUstream stream_;
  const c10::Device device_;
  const int64_t slot_bytes_;
};

/// The context that libtorch uses. Retained for good, as libtorch does.
CUcontext primary_context(const CudaApi& api, c10::Device device) {
  CUdevice number = 0;
  CUcontext context = nullptr;
  check_cuda(api, api.device_get(&number, device.index()), "cuDeviceGet");
  check_cuda(api, api.device_primary_ctx_retain(&context, number), "cuDevicePrimaryCtxRetain");
  check_cuda(api, api.ctx_set_current(context), "cuCtxSetCurrent");
  return context;
}

CudaIpcOptions checked_options(const CudaIpcOptions& options, const TransportSite& site) {
  if (site.host.memory_sharing() == nullptr)
    throw ConfigError(str("cuda_ipc serves ranks of one host that share memory, and those of group '", site.host.name(),
                          "' share none; start them on one host, in one container, or use NCCL (make_nccl_group())"));
  constexpr int64_t kLeastBytes = 4096;
  // A slot has room for one chunk per peer.
  if (options.slot_bytes < kLeastBytes * site.host.size() || options.message_bytes < kLeastBytes)
    throw ConfigError(str("cuda_ipc: slot_bytes=", options.slot_bytes, ", message_bytes=", options.message_bytes,
                          "; expected at least ", kLeastBytes * site.host.size(), " (", kLeastBytes, " per rank) and ",
                          kLeastBytes));
  return options;
}

size_t staging_bytes(const CudaIpcOptions& options, int size) {
  return static_cast<size_t>(kSlots * options.slot_bytes + size * kMailboxSlots * options.message_bytes);
}

}  // namespace

IpcTransport::IpcTransport(const CudaApi& api, const CudaIpcOptions& options, const TransportSite& site)
    : api_(api),
      options_(checked_options(options, site)),
      place_(site.state.place()),
      device_(site.device),
      context_(primary_context(api, site.device)),
      flags_(api, stream(), site.host),
      memory_(api, context_, site.host, staging_bytes(options_, place_.size)),
      sent_chunks_(static_cast<size_t>(place_.size)),
      taken_chunks_(static_cast<size_t>(place_.size)) {}

// The context owns everything that the members give back, so it must be current, whichever thread this is.
IpcTransport::~IpcTransport() { (void)api_.ctx_set_current(context_); }

CUstream IpcTransport::stream() const {
  // A thread that libtorch's runtime has not been used in has no context yet.
  check_cuda(api_, api_.ctx_set_current(context_), "cuCtxSetCurrent");
  return reinterpret_cast<CUstream>(current_stream(device_).native_handle());
}

std::byte* IpcTransport::slot(int rank, int64_t step) const {
  return memory_.of(rank) + step % kSlots * options_.slot_bytes;
}

std::byte* IpcTransport::mailbox(int from, int to, int64_t chunk) const {
  return memory_.of(from) + kSlots * options_.slot_bytes +
         (to * kMailboxSlots + chunk % kMailboxSlots) * options_.message_bytes;
}

void IpcTransport::throw_if_released(const Call& call) const {
  if (released_) throw CommError(ErrorCode::kPeerLost, str(describe(call), " was given up"));
}

void IpcTransport::collect(const Request& request) {
  using Flag = IpcFlags::Flag;
  const CUstream on = stream();
  const StreamMover mover(api_, on, device_, options_.slot_bytes);
  const auto algorithm = make_algorithm(place_, request, mover);
  std::vector<const std::byte*> slots(static_cast<size_t>(place_.size));
  for (int64_t index = 0; index < algorithm->steps(); ++index) {
    throw_if_released(request.call);
    const int64_t step = next_step_++;
    for (int peer = 0; peer < place_.size; ++peer) {
      slots[static_cast<size_t>(peer)] = slot(peer, step);
      if (peer != place_.rank) flags_.wait(on, {.owner = peer, .kind = Flag::kDone}, step + 1 - kSlots);
    }
    algorithm->post(index, slot(place_.rank, step));
    flags_.write(on, {.owner = place_.rank, .kind = Flag::kPosted}, step + 1);
    for (int peer = 0; peer < place_.size; ++peer)
      if (peer != place_.rank && algorithm->reads(peer))
        flags_.wait(on, {.owner = peer, .kind = Flag::kPosted}, step + 1);
    algorithm->read(index, slots);
    flags_.write(on, {.owner = place_.rank, .kind = Flag::kDone}, step + 1);
  }
}

void IpcTransport::pass(const Request& request) {
  if (request.call.kind == CallKind::kSend)
    send(request, stream());
  else
    receive(request, stream());
}

int64_t IpcTransport::mailbox_chunks(const Request& request) const {
  return (request.call.numel * request.itemsize() + options_.message_bytes - 1) / options_.message_bytes;
}

void IpcTransport::send(const Request& request, CUstream stream) {
  using Flag = IpcFlags::Flag;
  const int peer = request.call.root;
  const StreamMover mover(api_, stream, device_, options_.message_bytes);
  int64_t left_bytes = request.call.numel * request.itemsize();
  const std::byte* from = request.in();
  for (int64_t count = mailbox_chunks(request); count > 0; --count) {
    throw_if_released(request.call);
    ++chunks_;
    const int64_t chunk = sent_chunks_[static_cast<size_t>(peer)]++;
    const int64_t bytes = std::min(left_bytes, options_.message_bytes);
    flags_.wait(stream, {.owner = peer, .kind = Flag::kTaken, .peer = place_.rank}, chunk + 1 - kMailboxSlots);
    mover.copy(mailbox(place_.rank, peer, chunk), from, bytes);
    flags_.write(stream, {.owner = place_.rank, .kind = Flag::kSent, .peer = peer}, chunk + 1);
    from += bytes;
    left_bytes -= bytes;
  }
}

void IpcTransport::receive(const Request& request, CUstream stream) {
  using Flag = IpcFlags::Flag;
  const int peer = request.call.root;
  const StreamMover mover(api_, stream, device_, options_.message_bytes);
  int64_t left_bytes = request.call.numel * request.itemsize();
  std::byte* to = request.out();
  for (int64_t count = mailbox_chunks(request); count > 0; --count) {
    throw_if_released(request.call);
    ++chunks_;
    const int64_t chunk = taken_chunks_[static_cast<size_t>(peer)]++;
    const int64_t bytes = std::min(left_bytes, options_.message_bytes);
    flags_.wait(stream, {.owner = peer, .kind = Flag::kSent, .peer = place_.rank}, chunk + 1);
    mover.copy(to, mailbox(peer, place_.rank, chunk), bytes);
    flags_.write(stream, {.owner = place_.rank, .kind = Flag::kTaken, .peer = peer}, chunk + 1);
    to += bytes;
    left_bytes -= bytes;
  }
}

void IpcTransport::release() noexcept {
  released_ = true;
  flags_.release(next_step_ + kBeyond, chunks_ + kBeyond);
}

}  // namespace trireme::comm
