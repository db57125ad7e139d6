// A collective as one rank sees it, cut into steps that fit a slot. One file per collective implements this; nothing in
// them waits or synchronises: step_runner.cpp drives them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "comm/call.h"
#include "comm/fabric/control_block.h"

namespace trireme::comm {

/// Slots of one step by rank.
using Slots = std::span<const std::byte* const>;

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  /// At least 1, the same on every rank.
  virtual int64_t steps() const = 0;
  /// Writes what peers need from this rank in `step`. Comes after read(step - 1, ...).
  virtual void post(int64_t step, std::byte* slot) = 0;
  /// Takes what this rank needs from the slots of peers.
  virtual void read(int64_t step, Slots slots) = 0;
  /// Whether read() looks at the slot of `peer`.
  virtual bool reads(int peer) const = 0;
};

std::unique_ptr<Algorithm> make_all_reduce(const Place& place, const Request& request);
std::unique_ptr<Algorithm> make_reduce_scatter(const Place& place, const Request& request);
std::unique_ptr<Algorithm> make_all_gather(const Place& place, const Request& request);
std::unique_ptr<Algorithm> make_broadcast(const Place& place, const Request& request);
std::unique_ptr<Algorithm> make_all_to_all(const Place& place, const Request& request);
std::unique_ptr<Algorithm> make_gather(const Place& place, const Request& request);
std::unique_ptr<Algorithm> make_scatter(const Place& place, const Request& request);
/// Moves nothing: all ranks meet.
std::unique_ptr<Algorithm> make_barrier();
/// Fixed-size records of all ranks, in rank order: `records` [size * bytes], this rank's already in place.
std::unique_ptr<Algorithm> make_exchange(const Place& place, std::byte* records, int64_t bytes);

}  // namespace trireme::comm
