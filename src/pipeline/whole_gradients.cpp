#include "pipeline/whole_gradients.h"

#include <ATen/ops/full.h>

#include "trireme/base/log.h"
#include "trireme/device/device.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"
#include "trireme/pipeline/stage_runner.h"

namespace trireme {

WholeGradients whole_gradients_of(const Pager& pager, int ranks) {
  constexpr int64_t kMaster = 4, kStates = 8;
  WholeGradients cost{.memory_bytes = total_memory(pager.device()) / (is_host(pager.device()) ? ranks : 1)};
  const bool shards_weights = pager.policy().stage == 3;
  for (const UnitLayout& unit : pager.layout().units) {
    const auto itemsize = static_cast<int64_t>(c10::elementSize(unit.dtype));
    cost.kept_bytes += itemsize * (shards_weights ? unit.shard_numel : unit.numel());
    if (!unit.trainable) continue;
    const bool has_master = unit.dtype != at::kFloat;
    cost.kept_bytes += unit.piece_numel() * (kStates + (has_master ? kMaster : 0));
    const at::ScalarType sum = has_master ? pager.policy().accumulation_dtype : at::kFloat;
    cost.sum_bytes += unit.numel() * static_cast<int64_t>(c10::elementSize(sum));
  }
  return cost;
}

bool sums_whole_gradients(Training& training, const Group& world) {
  const Pager& pager = training.pager();
  const PagerPolicy& policy = pager.policy();
  Group& shards = training.groups().sums;
  const std::optional<bool> configured = training.config().pipeline.whole_gradients;
  const bool can_save = policy.stage >= 2 && shards.size() > 1;
  if (configured || !can_save || policy.deterministic || policy.offload_ratio > 0) return configured.value_or(false);
  const WithoutInterception own_operators;
  const WholeGradients cost = whole_gradients_of(pager, world.size());
  const at::Tensor is_too_much = at::full({1}, cost.fit() ? 0 : 1, at::kByte);
  shards.all_reduce(is_too_much, ReduceOp::kMax).wait();
  const bool sums = is_too_much.item<uint8_t>() == 0;
  if (world.rank() == 0)
    log(LogLevel::kInfo, str("trireme.pipeline.whole_gradients: \"auto\" is ", sums ? "true" : "false",
                             " on stage 0, where whole gradients are ", cost.sum_bytes, " bytes beside ",
                             cost.kept_bytes, " of weights and states, of ", cost.memory_bytes));
  return sums;
}

}  // namespace trireme
