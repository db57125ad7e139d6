#include "trireme/data/loader.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "trireme/base/error.h"

namespace trireme {
namespace {

const TokenDataset& checked(const TokenDataset& dataset, const LoaderOptions& o) {
  if (dataset.size() == 0)
    throw DataError("the data set of a loader is empty; set held_out_fraction above 0 to have one");
  if (o.micro_batch < 1) {
    throw ConfigError(trireme::str("micro_batch=", o.micro_batch, ": a micro-batch needs at least 1 sample"));
  }
  if (o.rank < 0 || o.rank >= o.world) {
    throw ConfigError(trireme::str("rank=", o.rank, " of world=", o.world, ": ranks count from 0 to world - 1"));
  }
  return dataset;
}

}  // namespace

DataLoader::DataLoader(TokenDataset dataset, const LoaderOptions& options)
    : dataset_(std::move(dataset)),
      options_(options),
      order_(checked(dataset_, options).size(), options.seed, options.order) {}

TokenBatch DataLoader::next() {
  auto batch = read(consumed_ + options_.rank * options_.micro_batch);
  consumed_ += options_.world * options_.micro_batch;
  return batch;
}

TokenBatch DataLoader::batch(int64_t global_micro_batch) const {
  return read(global_micro_batch * options_.micro_batch);
}

TokenBatch DataLoader::read(int64_t first_global_sample) const {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < options_.micro_batch; ++i) indices.push_back(order_(first_global_sample + i));
  return dataset_.batch(indices);
}

int64_t DataLoader::rounds_per_epoch() const {
  return std::max<int64_t>(1, dataset_.size() / (options_.world * options_.micro_batch));
}

double DataLoader::epochs() const { return static_cast<double>(consumed_) / static_cast<double>(dataset_.size()); }

LoaderState DataLoader::state() const { return {consumed_, options_.seed, dataset_.fingerprint()}; }

void DataLoader::load_state(const LoaderState& state) {
  if (state.fingerprint != dataset_.fingerprint()) {
    throw DataError(trireme::str("data position: saved for a data set with fingerprint ", state.fingerprint,
                                 ", but this one has ", dataset_.fingerprint(),
                                 "; resume with the same files, seq, held_out_fraction and split seed"));
  }
  if (state.seed != options_.seed) {
    throw DataError(trireme::str("data position: saved under seed ", state.seed, ", but the seed is ", options_.seed,
                                 "; resume with the same seed"));
  }
  if (state.samples_consumed < 0) {
    throw DataError(trireme::str("data position: samples_consumed=", state.samples_consumed, " cannot be negative"));
  }
  consumed_ = state.samples_consumed;
}

}  // namespace trireme
