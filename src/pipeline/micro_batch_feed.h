// The micro-batches of one step.
#pragma once

#include <vector>

#include "trireme/comm/group.h"
#include "trireme/pipeline/stage_runner.h"

namespace trireme {

class MicroBatchFeed {
 public:
  /// `is_needed`: this rank has the first or the last part of the model.
  MicroBatchFeed(Group& all, bool is_needed) : all_(all), is_needed_(is_needed) {}

  /// All `count` micro-batches of a step, before anything has changed. Collective.
  /// Throws    on every rank: DataError that names `call`, where the data ended; what loading them threw.
  void load(const MicroBatches& data, int count, const char* call);
  const MicroBatch& at(int micro_batch) const { return batches_[static_cast<size_t>(micro_batch)]; }
  void clear() { batches_.clear(); }

 private:
  Group& all_;
  const bool is_needed_;
  std::vector<MicroBatch> batches_;
};

}  // namespace trireme
