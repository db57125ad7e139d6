// Random numbers in the deterministic mode: each micro-batch draws from a stream of its own, whichever rank runs it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "trireme/comm/group.h"

namespace trireme {

class MicroBatchStreams {
 public:
  /// Rank 0's seed counts. Collective over `data`, whose ranks run the micro-batches in turn, and which outlives this.
  MicroBatchStreams(Group& data, c10::Device device);

  uint64_t seed() const { return seed_; }
  void set_seed(uint64_t seed) { seed_ = seed; }
  /// This rank's next micro-batch is the `micro_step`-th of a window, before which the run had `micro_batches`.
  void start(int64_t micro_batches, int64_t micro_step) const;

 private:
  Group& data_;
  c10::Device device_;
  uint64_t seed_ = 0;
};

}  // namespace trireme
