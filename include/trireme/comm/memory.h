// Memory of a group beyond the tensors of its calls: shared by its ranks, or registered for its collectives. Not every
// group has it; Group::memory_sharing() and Group::buffer_registration() say so.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace trireme {

/// Memory that every rank of a group can read and write. Unmapped when the last holder goes; nothing is left behind
/// after a crash.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  /// Start of rank `rank`'s part; page-aligned, zero-filled at first.
  virtual std::byte* of(int rank) const = 0;
  /// Bytes of each part.
  virtual size_t bytes() const = 0;
};

/// The peer and the operation that a wait is for, for the text of a CommError; read only if the wait fails.
struct WaitReason {
  int peer = -1;                             ///< rank in the group that is waited for; -1: any
  std::string_view operation = {};           ///< e.g. "reduction of gradients"
  int64_t seq = 0;                           ///< its number among these operations, from 1; 0: not counted
  std::function<std::string()> detail = {};  ///< e.g. the name of the parameter whose turn it is
};

/// A group whose ranks can all map the same memory: makes it, and waits for peers that write it. Lives with the group.
class MemorySharing {
 public:
  enum class Share {
    kOne,   ///< one segment that all ranks see: of(r) is the same for every r
    kEach,  ///< one segment per rank
  };
  /// [bytes] of zeros. Collective.
  virtual std::shared_ptr<SharedMemory> share(size_t bytes, Share mode) = 0;

  /// Blocks until `ready()`: spins, then sleeps on a futex; wakes when a peer calls notify(). `ready` must be cheap and
  /// must not throw.
  ///
  /// Cost      one call of `ready` when it is true already.
  /// Throws    CommError naming the peer and the operation when the peer is gone or the timeout has passed.
  template <class Ready>
  void wait_until(const Ready& ready, const WaitReason& reason) {
    if (ready()) [[likely]]
      return;
    wait_slowly([&ready] { return static_cast<bool>(ready()); }, reason);
  }
  /// Wakes peers that sleep in wait_until(): call after writing shared memory that they wait for.
  virtual void notify() noexcept = 0;

 protected:
  ~MemorySharing() = default;
  /// wait_until() after `ready` was false once.
  virtual void wait_slowly(const std::function<bool()>& ready, const WaitReason& reason) = 0;
};

/// A group over a device whose transport moves registered memory in place. Lives with the group; its tensors may
/// outlive it.
class BufferRegistration {
 public:
  /// [bytes] of zeros on the group's device, to use again and again in all_reduce(), reduce_scatter() and all_gather():
  /// NCCL moves them without a copy of its own. Collective. Ask for few, large and long-lived tensors: NCCL rounds each
  /// up to the driver's granularity for multicast, and memory is freed only when all tensors are dropped, by the next
  /// call, or with the group.
  /// Throws    ConfigError (kUnsupported): an NCCL that cannot. CommError: NCCL's own, such as too little memory.
  virtual at::Tensor zeros(int64_t bytes) = 0;

 protected:
  ~BufferRegistration() = default;
};

}  // namespace trireme
