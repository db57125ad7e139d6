// The loss on data that training never sees.
#pragma once

#include <cstdint>
#include <functional>

#include "trireme/comm/group.h"
#include "trireme/data/dataset.h"
#include "trireme/models/language_model.h"
#include "trireme/topology.h"

namespace trireme::cli {

struct EvaluateOptions {
  int64_t samples = 256;    ///< at most; the first ones of the split
  int64_t micro_batch = 8;  ///< samples per forward pass
};

/// The mean loss of a batch; the same on all ranks that got the batch.
using LossOf = std::function<at::Tensor(const TokenBatch&)>;

/// Mean loss over the first `samples` of `data`, each sample counted once. Ranks of one `place` among the ranks of
/// `group` get the same batches. Collective; the same on every rank, and on any number of ranks up to rounding. Draws
/// no random numbers.
///
/// Requires  a data set that is not empty.
double evaluate(LanguageModel& model, const LossOf& loss_of, const TokenDataset& data, Group& group, DataPlace place,
                const EvaluateOptions& options);

/// `batch` where the model is; to a device it goes while the host goes on.
TokenBatch on_device(TokenBatch batch, c10::Device device);

}  // namespace trireme::cli
