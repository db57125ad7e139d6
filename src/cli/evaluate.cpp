#include "cli/evaluate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace trireme::cli {

double evaluate(LanguageModel& model, const LossOf& loss_of, const TokenDataset& data, Group& group, DataPlace place,
                const EvaluateOptions& options) {
  const at::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  const int64_t samples = std::min(options.samples, data.size());
  const int64_t round = options.micro_batch * place.size;
  double sum = 0;
  for (int64_t begin = 0; begin < samples; begin += round) {
    // Every rank runs every round, since a forward pass may gather weights from all; one without a share repeats the
    // first samples and does not count them.
    const int64_t own_begin = begin + place.rank * options.micro_batch;
    const int64_t own = std::clamp<int64_t>(samples - own_begin, 0, options.micro_batch);
    std::vector<int64_t> indices(std::max<int64_t>(own, 1));
    std::iota(indices.begin(), indices.end(), own > 0 ? own_begin : 0);
    const auto batch = on_device(data.batch(indices), model.device());
    sum += loss_of(batch).item<double>() * static_cast<double>(own);
  }
  model.train(was_training);
  const auto total = at::tensor({sum}, at::kDouble);
  group.all_reduce(total).wait();
  const int64_t sharing = group.size() / place.size;
  return total.item<double>() / static_cast<double>(samples * sharing);
}

TokenBatch on_device(TokenBatch batch, c10::Device device) {
  if (device.is_cpu()) return batch;
  const auto move = [&](const at::Tensor& tokens) { return tokens.pin_memory().to(device, /*non_blocking=*/true); };
  return {move(batch.input), move(batch.target)};
}

}  // namespace trireme::cli
