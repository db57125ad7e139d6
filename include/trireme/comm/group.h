// Collectives over a fixed set of ranks. One interface, several backends: shm (processes of one host), c10d (over
// torch.distributed), nccl and cuda_ipc (GPUs), threads (ranks of one process, for tests), fake (for the planner).
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme {

enum class ReduceOp { kSum, kMean, kMax, kMin };

/// How a collective ends. wait() rethrows what the operation threw. Until then the tensors are held alive.
template <class T>
class Pending;

struct ShardRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
};

/// Which elements of a tensor of `numel` elements rank `rank` of `size` owns: ceil(numel / size) each, the last ones
/// fewer.
constexpr ShardRange shard_range(int64_t numel, int size, int rank) {
  const int64_t chunk = (numel + size - 1) / size;
  const int64_t begin = chunk * rank < numel ? chunk * rank : numel;
  const int64_t end = begin + chunk < numel ? begin + chunk : numel;
  return {begin, end};
}

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

/// Whom and what a wait is for; becomes the text of a CommError. Nothing is copied or asked unless the wait fails.
struct WaitReason {
  int peer = -1;                             ///< rank in the group that is waited for; -1: any
  std::string_view operation = {};           ///< e.g. "reduction of gradients"
  int64_t seq = 0;                           ///< how many of these there were, from 1; 0: not counted
  std::function<std::string()> detail = {};  ///< e.g. the name of the parameter whose turn it is
};

struct CommCounters {
  int64_t calls = 0;       ///< collectives issued by this rank
  int64_t bytes_sent = 0;  ///< by the cost line of each collective
};

class Group {
 public:
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  /// Whether it moves tensors on `device`; every group moves those on the host.
  virtual bool serves(c10::Device device) const { return device.is_cpu(); }

  // Shapes: tensors are contiguous; n elements. Ranks call in the same order with the same n, dtype and options;
  // otherwise every rank gets CommError(kDiverged) that names both calls. Sums are folded in rank order in fp32 (fp64
  // for fp64, the integer type itself for integers), then rounded once: the same bits on every rank and in every
  // backend but nccl, which adds in an order of its own (docs/comm.md).

  /// In place. Cost: sends 2 (N-1)/N n elements per rank.
  virtual Pending<void> all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) = 0;
  /// input [n] -> output [shard_range(n, size, rank).numel()]. `output` may be fp32 while `input` is bf16 or fp16.
  virtual Pending<void> reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                       ReduceOp op = ReduceOp::kSum) = 0;
  /// input [shard_range(n, size, rank).numel()] -> output [n]; `input` may be output's own slice (in place).
  virtual Pending<void> all_gather(const at::Tensor& output, const at::Tensor& input) = 0;
  /// all_gather() of each output with its input, in one launch where the backend can. Cost: theirs.
  std::vector<Pending<void>> all_gather_coalesced(const std::vector<at::Tensor>& outputs,
                                                  const std::vector<at::Tensor>& inputs);
  virtual Pending<void> broadcast(const at::Tensor& tensor, int root) = 0;
  /// input [size * n], block i goes to rank i -> output [size * n], block i from rank i.
  virtual Pending<void> all_to_all(const at::Tensor& output, const at::Tensor& input) = 0;
  /// input [n] of every rank -> output [size * n] on root; other ranks pass an undefined output.
  virtual Pending<void> gather(const at::Tensor& output, const at::Tensor& input, int root) = 0;
  /// input [size * n] on root (undefined elsewhere) -> output [n] on every rank.
  virtual Pending<void> scatter(const at::Tensor& output, const at::Tensor& input, int root) = 0;
  /// Messages between a pair of ranks arrive in the order sent. They do not count in the group's sequence of
  /// collectives.
  virtual Pending<void> send(const at::Tensor& tensor, int peer) = 0;
  virtual Pending<void> recv(const at::Tensor& tensor, int peer) = 0;
  virtual void barrier() = 0;

  /// Whether registered_zeros() on `device` are more than zeros.
  virtual bool registers(c10::Device) const { return false; }
  /// [bytes] of zeros on `device` for all_reduce(), reduce_scatter() and all_gather() over and over: NCCL moves what is
  /// there without a copy of its own. It may outlive the group. Collective. Ask for few and large ones, for long: NCCL
  /// rounds each up to what the driver recommends for multicast, and what is dropped is freed when all is, by the next
  /// call, or with the group.
  /// Throws    ConfigError (kUnsupported): an NCCL that cannot. CommError: what it says, such as too little memory.
  virtual at::Tensor registered_zeros(int64_t bytes, c10::Device device);

  /// Collective over this group: ranks that stand in `members` (ranks of this group, ascending) get the new group,
  /// others nullptr.
  virtual std::unique_ptr<Group> split(const std::vector<int>& members, const std::string& name) = 0;

  /// True where share() works: all ranks can map the same memory.
  virtual bool shares_memory() const = 0;
  enum class Share {
    kOne,
    kEach
  };  ///< one segment seen by all (of(r) is the same for every r), or one segment per rank
  /// Collective. Throws StateError where shares_memory() is false.
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

  /// Makes this group unusable everywhere: peers' next waits throw CommError(kPeerLost) with this rank and `reason`.
  virtual void abort(const std::string& reason) noexcept = 0;

  virtual std::chrono::milliseconds timeout() const = 0;
  virtual CommCounters counters() const = 0;
  /// The last operations of this rank, oldest first, one a line: sequence number, operation, numel, dtype, start,
  /// duration.
  virtual std::string flight_record() const = 0;

 protected:
  Group() = default;
  /// all_gather_coalesced() of as many inputs as outputs.
  virtual std::vector<Pending<void>> gather_each(const std::vector<at::Tensor>& outputs,
                                                 const std::vector<at::Tensor>& inputs);
  /// wait_until() when the first look was in vain.
  virtual void wait_slowly(const std::function<bool()>& ready, const WaitReason& reason) = 0;
};

/// A started operation. Not copyable. Dropped without wait(), it neither blocks nor cancels: the group completes the
/// operation in the background and holds its tensors until then.
template <>
class [[nodiscard]] Pending<void> {
 public:
  class Operation {
   public:
    virtual ~Operation() = default;
    virtual void wait() = 0;
    virtual bool done() noexcept = 0;
    virtual void drop() noexcept = 0;  ///< nobody will wait
  };
  Pending() = default;  ///< already complete
  explicit Pending(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
  ~Pending() { drop(); }
  Pending(Pending&&) noexcept = default;
  Pending& operator=(Pending&& other) noexcept {
    drop();
    operation_ = std::move(other.operation_);
    return *this;
  }
  void wait() {
    if (auto operation = std::move(operation_)) operation->wait();
  }
  bool done() const noexcept { return !operation_ || operation_->done(); }

 private:
  void drop() noexcept {
    if (auto operation = std::move(operation_)) operation->drop();
  }
  std::shared_ptr<Operation> operation_;  // shared with the group, which may have to complete it after this is gone
};

}  // namespace trireme
