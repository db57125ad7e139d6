// The counts of the pager and the optimizer on every rank, against ZeRO's closed forms: equal to the byte.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "tests/support/run_ranks.h"
#include "trireme/engine/model_engine.h"
#include "trireme/plan/estimate.h"

namespace trireme {
namespace {

struct Net : torch::nn::Module {
  Net() {
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(33, 33)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x).tanh();
    return x.square().mean();
  }
  std::vector<torch::nn::Linear> layers;
};

struct Case {
  at::ScalarType weights;
  at::ScalarType accumulation;
  int64_t gradient_bytes;  // per parameter
  int64_t sharded_bytes;   // masters and Adam's moments, per parameter
  at::ScalarType update = at::kFloat;
};

Config configure(const Case& precision, int stage, GatherPolicy gather, int world) {
  Config config = default_config(world);
  config.optimizer = OptimizerOptions{};
  config.pager.stage = stage;
  config.pager.gather = gather;
  config.pager.live_bytes = 1;
  config.pager.units.merge_below_bytes = 0;
  config.pager.accumulation_dtype = precision.accumulation;
  config.precision.weight_dtype = precision.weights;
  config.precision.accumulation_dtype = precision.accumulation;
  config.precision.update_dtype = precision.update;
  return config;
}

// Bytes per (padded) parameter on one rank, multiplied by the ranks so that it stays whole.
int64_t bytes_times_world(const Case& precision, int stage, int world) {
  const int64_t weight = static_cast<int64_t>(c10::elementSize(precision.weights));
  const int64_t whole_weight = stage < 3 ? weight * world : weight;
  const int64_t whole_gradient = stage < 2 ? precision.gradient_bytes * world : precision.gradient_bytes;
  const int64_t whole_states = stage < 1 ? precision.sharded_bytes * world : precision.sharded_bytes;
  return whole_weight + whole_gradient + whole_states;
}

void expect_closed_form(Rank& rank, const Case& precision, int stage, GatherPolicy gather) {
  Net net;
  ModelEngine<Net> engine(rank.world(), net, {.config = configure(precision, stage, gather, rank.size())});
  engine.backward(engine(at::ones({2, 33}, precision.weights)));
  engine.step();

  int64_t padded = 0, used = 0, largest_unit_bytes = 0;
  for (const UnitLayout& unit : engine.pager().layout().units) {
    padded += unit.numel();
    used += unit.used_numel;
    largest_unit_bytes =
        std::max(largest_unit_bytes, unit.numel() * static_cast<int64_t>(c10::elementSize(unit.dtype)));
  }
  const PagerMemory memory = engine.pager().memory();
  const int64_t held = memory.weight_bytes + memory.gradient_bytes + engine.optimizer_bytes();
  EXPECT_EQ(held * rank.size(), padded * bytes_times_world(precision, stage, rank.size())) << "stage " << stage;
  EXPECT_EQ(used, 4 * (33 * 33 + 33));
  // 33*33 and 33 elements are rounded up to 1120 and 64, 37 blocks of 32 (64 bytes in bf16); every rank holds as many.
  const int64_t blocks = (37 + rank.size() - 1) / rank.size() * rank.size();
  EXPECT_EQ(padded, 4 * 32 * blocks);
  EXPECT_LE(memory.peak_live_bytes, 2 * largest_unit_bytes) << "live units that the policy does not allow";
  if (stage < 3 || gather == GatherPolicy::kShared) {
    EXPECT_EQ(memory.peak_live_bytes, 0);
  }

  const ModelStates planned =
      estimate_model_states(engine.pager().layout(), {.stage = stage,
                                                      .world = rank.size(),
                                                      .weight_dtype = precision.weights,
                                                      .accumulation_dtype = precision.accumulation,
                                                      .update_dtype = precision.update,
                                                      .optimizer = {}});
  EXPECT_EQ(planned.total(), held) << "the planner and the engine disagree";
}

TEST(Memory, OfModelStatesEqualsTheClosedFormAtEveryStage) {
  at::set_num_threads(1);
  const std::vector<Case> precisions = {{at::kFloat, at::kFloat, 4, 8},
                                        {at::kBFloat16, at::kFloat, 4, 12},
                                        {at::kBFloat16, at::kBFloat16, 2, 12},
                                        {at::kBFloat16, at::kBFloat16, 2, 4, at::kBFloat16}};
  for (const int world : {1, 2, 3, 4})
    for (const Case& precision : precisions)
      for (int stage = 0; stage <= 3; ++stage)
        for (const GatherPolicy gather : {GatherPolicy::kShared, GatherPolicy::kCopy})
          run_ranks(world, [&](Rank& rank) { expect_closed_form(rank, precision, stage, gather); });
}

}  // namespace
}  // namespace trireme
