// Random numbers in the deterministic mode: each micro-batch draws from a stream of its own, whichever rank runs it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "trireme/comm/group.h"
#include "trireme/topology.h"

namespace trireme {

/// Seeds the random number generators before each micro-batch.
class MicroBatchStreams {
 public:
  /// Takes rank 0's seed. Ranks of the same `place` run the same micro-batches. Collective over `group`.
  MicroBatchStreams(Group& group, DataPlace place, c10::Device device);

  uint64_t seed() const { return seed_; }
  void set_seed(uint64_t seed) { seed_ = seed; }
  /// Seeds for this rank's micro-batch number `micro_step` of a window, before which the run had `micro_batches`.
  void start(int64_t micro_batches, int64_t micro_step) const;

 private:
  DataPlace place_;
  c10::Device device_;
  uint64_t seed_ = 0;
};

}  // namespace trireme
