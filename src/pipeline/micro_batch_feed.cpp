#include "pipeline/micro_batch_feed.h"

#include <optional>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"

namespace trireme {

void MicroBatchFeed::load(const MicroBatches& data, int count, const char* call) {
  batches_.clear();
  all_or_throw(all_, [&] {
    if (!is_needed_) return;
    for (int i = 0; i < count; ++i) {
      std::optional<MicroBatch> batch = data();
      if (!batch)
        throw DataError(str(call, ": the data ended after ", i, " of ", count,
                            " micro-batches; stop before, or begin the data anew"));
      batches_.push_back(*std::move(batch));
    }
  });
}

}  // namespace trireme
