// Micro-batches whose sequences are cut over ranks.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "pipeline/micro_batch_feed.h"
#include "trireme/comm/group.h"
#include "trireme/sequence/sequence_parallel.h"

namespace trireme {

/// Ranks along "sequence" get the same micro-batches, and cut them: inputs on the first stage, labels on the last one.
/// The first input of at least two dims has its tokens along dim 1, and so has each other tensor of inputs and labels
/// whose dim 1 is as long. Micro-batches of which the program has cut a tensor itself stay as they are.
class SequenceCut {
 public:
  /// The part of a micro-batch that a stage needs.
  struct Needs {
    bool inputs = false, labels = false;
  };

  /// `sequence` is null where sequences are not cut. `group`: of it. `stages` has one rank per stage, `all` every rank.
  SequenceCut(SequenceParallel* sequence, Group* group, Group& stages, Group& all, Needs needs)
      : sequence_(sequence), group_(group), stages_(stages), all_(all), needs_(needs) {}

  bool is_on() const { return sequence_ != nullptr; }
  /// Compares micro-batches [0, count) of `feed`, and learns of their tokens, before anything has changed. Collective.
  /// Throws    on every rank: StateError: ranks along "sequence" have different ones; ShapeError: fewer than two tokens
  ///           for some rank.
  void agree(const MicroBatchFeed& feed, int count);
  /// This rank's part of the inputs or labels of a micro-batch.
  c10::IValue part_of(const c10::IValue& value, int micro_batch) const;

 private:
  int64_t tokens_of(const MicroBatch& batch) const;
  bool has_part(const c10::IValue& value) const;
  std::string text_of(const c10::IValue& value, const char* name, int micro_batch) const;

  SequenceParallel* const sequence_;
  Group* const group_;
  Group& stages_;
  Group& all_;
  const Needs needs_;
  std::vector<int64_t> tokens_;  ///< by micro-batch; 0: it is not cut
};

}  // namespace trireme
