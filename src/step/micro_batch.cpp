#include "trireme/step/micro_batch.h"

#include <ATen/ops/from_blob.h>

#include "trireme/intercept.h"
#include "trireme/intercept/random_streams.h"

namespace trireme {

MicroBatchStreams::MicroBatchStreams(Group& group, DataPlace place, c10::Device device)
    : place_(place), device_(device), seed_(generator_seed()) {
  group.broadcast(at::from_blob(&seed_, {sizeof(seed_)}, at::TensorOptions().dtype(at::kByte)), 0).wait();
}

void MicroBatchStreams::start(int64_t micro_batches, int64_t micro_step) const {
  const int64_t index = micro_batches + micro_step * place_.size + place_.rank;
  const uint64_t seed = stream_seed(seed_, static_cast<uint64_t>(index));
  manual_seed(seed);
  manual_seed_device(device_, seed);
}

}  // namespace trireme
