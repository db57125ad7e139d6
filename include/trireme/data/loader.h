// Which samples a rank reads, and when. The order is a pure function of the global sample index and a seed: it does not
// depend on the number of ranks, and a position is one number.
#pragma once

#include <cstdint>

#include "trireme/data/dataset.h"

namespace trireme {

/// The order of samples.
enum class Order {
  kShuffled,  ///< a new permutation per epoch
  kInOrder,   ///< as stored: for evaluation
};

/// A permutation of [0, size) per epoch, computed and not stored (a Feistel network with cycle walking).
class SampleOrder {
 public:
  /// Requires  size > 0.
  SampleOrder(int64_t size, uint64_t seed, Order order);

  /// The sample that stands at position `global_sample` >= 0 of the endless sequence of epochs.
  ///
  /// Cost      below 4 passes of 4 rounds on average, no memory.
  int64_t operator()(int64_t global_sample) const;

 private:
  uint64_t encrypt(uint64_t value, uint64_t key) const;

  int64_t size_;
  uint64_t seed_;
  Order order_;
  int half_bits_ = 1;
};

/// Options of a DataLoader.
struct LoaderOptions {
  int64_t micro_batch = 1;  ///< samples per call of next()
  int64_t rank = 0;         ///< in the data-parallel group
  int64_t world = 1;        ///< its size
  uint64_t seed = 0;
  Order order = Order::kShuffled;
};

/// Where a loader stands. The same on all ranks between two calls of next(); plain integers, to be saved as they are.
struct LoaderState {
  int64_t samples_consumed = 0;  ///< by all ranks together, since the start of training
  uint64_t seed = 0;
  int64_t fingerprint = 0;  ///< of the data set
};

/// Hands out micro-batches: micro-batch m of the job belongs to rank m mod world.
class DataLoader {
 public:
  /// Throws    DataError: the data set is empty; ConfigError: micro_batch, rank or world out of range.
  DataLoader(TokenDataset dataset, const LoaderOptions& options);

  /// This rank's next micro-batch: samples consumed + rank * micro_batch onwards. Then world * micro_batch samples
  /// count as consumed, so all ranks must call it equally often. Epochs follow without a gap or a short batch.
  ///
  /// Shapes    -> input [micro_batch, S], target [micro_batch, S].
  TokenBatch next();

  /// Micro-batch `global_micro_batch` of the job, counted from the start of training; does not move the position.
  TokenBatch batch(int64_t global_micro_batch) const;

  /// Calls of next() in one epoch, rounded down so that no sample is read twice; at least 1.
  int64_t rounds_per_epoch() const;
  double epochs() const;  ///< consumed so far
  const TokenDataset& dataset() const { return dataset_; }

  LoaderState state() const;
  /// Continues exactly where `state` was taken; micro_batch and world may differ from then.
  ///
  /// Throws    DataError: saved for another data set or seed, with both values.
  void load_state(const LoaderState& state);

 private:
  TokenBatch read(int64_t first_global_sample) const;

  TokenDataset dataset_;
  LoaderOptions options_;
  SampleOrder order_;
  int64_t consumed_ = 0;
};

}  // namespace trireme
