// A collective as one rank sees it, cut into steps that fit a slot. One file per collective implements this; nothing in
// them waits or synchronises: step_runner.cpp drives them on the host, cuda_ipc on a stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "comm/call.h"
#include "comm/fabric/control_block.h"
#include "comm/fabric/fold.h"

namespace trireme::comm {

/// Slots of one step by rank.
using Slots = std::span<const std::byte* const>;

/// How an Algorithm moves and folds bytes: at once, or by enqueuing it.
class Mover {
 public:
  virtual ~Mover() = default;
  virtual int64_t slot_bytes() const = 0;
  /// Nothing to do for an empty range (its pointers may be null) or in place.
  virtual void copy(std::byte* to, const std::byte* from, int64_t bytes) const = 0;
  /// As fold() in fold.h.
  virtual void fold(const FoldKind& kind, std::byte* output, Slots sources, int64_t numel) const = 0;
};
/// By the host, at once, through slots of kSlotBytes.
const Mover& host_mover();

class Algorithm {
 public:
  explicit Algorithm(const Mover& mover) : mover_(mover) {}
  virtual ~Algorithm() = default;
  /// At least 1, the same on every rank.
  virtual int64_t steps() const = 0;
  /// Writes what peers need from this rank in `step`. Comes after read(step - 1, ...).
  virtual void post(int64_t step, std::byte* slot) = 0;
  /// Takes what this rank needs from the slots of peers.
  virtual void read(int64_t step, Slots slots) = 0;
  /// Whether read() looks at the slot of `peer`.
  virtual bool reads(int peer) const = 0;

 protected:
  const Mover& mover_;
};

/// By the kind of `request`, a collective. `mover` outlives the algorithm.
std::unique_ptr<Algorithm> make_algorithm(const Place& place, const Request& request, const Mover& mover);

std::unique_ptr<Algorithm> make_all_reduce(const Place& place, const Request& request, const Mover& mover);
std::unique_ptr<Algorithm> make_reduce_scatter(const Place& place, const Request& request, const Mover& mover);
std::unique_ptr<Algorithm> make_all_gather(const Place& place, const Request& request, const Mover& mover);
std::unique_ptr<Algorithm> make_broadcast(const Place& place, const Request& request, const Mover& mover);
std::unique_ptr<Algorithm> make_all_to_all(const Place& place, const Request& request, const Mover& mover);
std::unique_ptr<Algorithm> make_gather(const Place& place, const Request& request, const Mover& mover);
std::unique_ptr<Algorithm> make_scatter(const Place& place, const Request& request, const Mover& mover);
/// Moves nothing: all ranks meet.
std::unique_ptr<Algorithm> make_barrier();
/// Fixed-size records of all ranks, in rank order: `records` [size * bytes], this rank's already in place.
std::unique_ptr<Algorithm> make_exchange(const Place& place, std::byte* records, int64_t bytes);

}  // namespace trireme::comm
