// Random numbers in the deterministic mode: each micro-batch draws from a stream of its own, whichever rank runs it.
#include <ATen/ops/from_blob.h>

#include "trireme/engine/engine.h"
#include "trireme/intercept/random_streams.h"

namespace trireme {

void Engine::agree_on_micro_batch_seed() {
  if (!config_.pager.deterministic) return;
  micro_batch_seed_ = generator_seed();
  at::Tensor seed =
      at::from_blob(&micro_batch_seed_, {sizeof(micro_batch_seed_)}, at::TensorOptions().dtype(at::kByte));
  group_.broadcast(seed, 0).wait();
  seed_micro_batch();
}

void Engine::seed_micro_batch() const {
  if (!config_.pager.deterministic) return;
  const int64_t before_window = progress_.global_samples / train_micro_batch_size_per_gpu();
  const int64_t index = before_window + window_.micro_steps * group_.size() + group_.rank();
  const uint64_t seed = stream_seed(micro_batch_seed_, static_cast<uint64_t>(index));
  manual_seed(seed);
  manual_seed_device(pager_->device(), seed);
}

}  // namespace trireme
