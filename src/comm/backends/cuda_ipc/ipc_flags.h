// Counters that the GPUs of all ranks and their hosts see: streams wait for them and write them, in the memory of the
// host.
//
// A counter only grows, and is compared as sequence numbers are: value a is reached by b where b - a, taken as a signed
// number, is not negative.
#pragma once

#include "comm/backends/cuda_ipc/cuda_api.h"

#include <atomic>
#include <memory>

#include "comm/call.h"

namespace trireme::comm {

class IpcFlags {
 public:
  /// Collective over `host`, which shares memory. Throws ConfigError: the device has no operations of streams on
  /// memory.
  IpcFlags(const CudaApi& api, CUstream probe, Group& host);
  ~IpcFlags();
  IpcFlags(const IpcFlags&) = delete;
  IpcFlags& operator=(const IpcFlags&) = delete;

  /// One counter: the only one who writes it is `owner`.
  struct Flag {
    enum Kind { kPosted, kDone, kSent, kTaken };
    int owner;
    Kind kind;
    int peer = 0;  ///< of kSent and kTaken: the other end
  };
  /// Makes later work of `stream` wait until `flag` has reached `value`.
  void wait(CUstream stream, const Flag& flag, int64_t value) const;
  /// `flag` has `value` when all that `stream` was told before is over and can be seen by peers.
  void write(CUstream stream, const Flag& flag, int64_t value) const;

  /// Lets every wait end whose value is at most `steps`, of steps, or `chunks`, of messages. A stream that goes on
  /// writes lower values over it, so this is repeated until none does.
  void release(int64_t steps, int64_t chunks) const noexcept;

 private:
  size_t offset(const Flag& flag) const;
  void raise(const Flag& flag, int64_t value) const noexcept;

  const CudaApi& api_;
  const Place place_;
  const std::shared_ptr<SharedMemory> memory_;
  CUdeviceptr address_ = 0;  // of memory_, for the GPU
};

}  // namespace trireme::comm
