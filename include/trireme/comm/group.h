// Collectives over a fixed set of ranks. One class, several backends: shm (processes of one host), c10d (over
// torch.distributed), nccl and cuda_ipc (GPUs), threads (ranks of one process, for tests), fake (for the planner).
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "trireme/comm/memory.h"

namespace trireme {

enum class ReduceOp { kSum, kMean, kMax, kMin };

/// The handle of a started operation. wait() rethrows what the operation threw. Until then the tensors are held alive.
template <class T>
class Pending;

/// Elements [begin, end).
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

/// Counts since the group was made.
struct CommCounters {
  int64_t calls = 0;       ///< collectives issued by this rank
  int64_t bytes_sent = 0;  ///< by the cost line of each collective
};

namespace comm {
class Backend;
struct Request;
}  // namespace comm

/// Checks the arguments of a call, counts it, and hands it to the backend that moves its data.
class Group final {
 public:
  explicit Group(std::unique_ptr<comm::Backend> backend);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const;
  /// The rank in the world of this group's rank `rank`: the world is the group from which others are split.
  int world_rank(int rank) const;
  /// Whether the group takes tensors on `device`; every group takes tensors on the host.
  bool serves(c10::Device device) const { return device.is_cpu() || device == device_; }

  // Shapes: tensors are contiguous; n elements. Ranks call in the same order with the same n, dtype and options;
  // otherwise every rank gets CommError(kDiverged) that names both calls. Sums are folded in rank order in fp32 (fp64
  // for fp64, the integer type itself for integers), then rounded once: the same bits on every rank and in every
  // backend but nccl, which adds in an order of its own (docs/comm.md).

  /// In place. Cost: a rank sends 2 (N-1)/N n elements.
  Pending<void> all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum);
  /// input [n] -> output [shard_range(n, size, rank).numel()]. `output` may be fp32 while `input` is bf16 or fp16.
  Pending<void> reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum);
  /// input [shard_range(n, size, rank).numel()] -> output [n]; `input` may be output's own slice (in place).
  Pending<void> all_gather(const at::Tensor& output, const at::Tensor& input);
  /// all_gather() of each output with its input, in one launch where the backend can. Cost: theirs.
  std::vector<Pending<void>> all_gather_coalesced(const std::vector<at::Tensor>& outputs,
                                                  const std::vector<at::Tensor>& inputs);
  Pending<void> broadcast(const at::Tensor& tensor, int root);
  /// input [size * n], block i goes to rank i -> output [size * n], block i from rank i.
  Pending<void> all_to_all(const at::Tensor& output, const at::Tensor& input);
  /// input [n] of every rank -> output [size * n] on root; other ranks pass an undefined output.
  Pending<void> gather(const at::Tensor& output, const at::Tensor& input, int root);
  /// input [size * n] on root (undefined elsewhere) -> output [n] on every rank.
  Pending<void> scatter(const at::Tensor& output, const at::Tensor& input, int root);
  /// Messages between a pair of ranks arrive in the order sent. They do not count in the group's sequence of
  /// collectives.
  Pending<void> send(const at::Tensor& tensor, int peer);
  Pending<void> recv(const at::Tensor& tensor, int peer);
  /// Returns when all ranks have called it. Blocks the host; does not wait for devices.
  void barrier();

  /// A new group for each of `parts`: lists of ranks of this group, each ascending, of which no two share a rank. A
  /// rank gets the group of its part, named `name` there, and nullptr where it is in none. `name` may differ by part.
  ///
  /// Cost      one collective over this group, however many parts there are.
  /// Throws    ShapeError: a part without ranks, a rank that is not in this group or stands twice; each is named.
  ///           StateError: too many groups over one process group of torch.distributed (docs/comm.md).
  std::unique_ptr<Group> split(const std::vector<std::vector<int>>& parts, const std::string& name);
  /// split() into one part of all ranks: the same ranks with a sequence of collectives of their own.
  std::unique_ptr<Group> clone(const std::string& name);

  /// The memory that all ranks can map; nullptr where they share none.
  MemorySharing* memory_sharing() const;
  /// The memory on `device` that is registered for collectives; nullptr where the backend registers none.
  BufferRegistration* buffer_registration(c10::Device device) const;

  /// Makes this group unusable everywhere: peers' next waits throw CommError(kPeerLost) with this rank and `reason`.
  void abort(const std::string& reason) noexcept;

  std::chrono::milliseconds timeout() const;
  CommCounters counters() const;
  /// The last operations of this rank, oldest first, one a line: sequence number, operation, numel, dtype, start,
  /// duration.
  std::string flight_record() const;

  /// For Trireme's own backends, which build on one another.
  comm::Backend& backend() const { return *backend_; }

 private:
  /// Refuses tensors on devices that the backend does not serve. Returns the bytes that the call sends.
  int64_t check(const comm::Request& request) const;
  Pending<void> submit(comm::Request request);

  const std::unique_ptr<comm::Backend> backend_;
  const int rank_;
  const int size_;
  const c10::Device device_;
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
