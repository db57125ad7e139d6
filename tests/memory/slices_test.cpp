// A model that zero::Init has sharded becomes slices without ever standing whole, or as whole slices, on a rank.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>

#include "tests/support/live_bytes.h"
#include "tests/support/run_ranks.h"
#include "trireme/pager/init/init.h"
#include "trireme/training/training.h"

namespace trireme::slices_memory {
namespace {

constexpr int kLayers = 32, kTensor = 2, kData = 4;
constexpr int64_t kWidth = 96, kLayerBytes = kWidth * kWidth * 4;

/// Matrices that are cut by outputs and by inputs in turn.
struct Net : torch::nn::Module {
  Net() {
    for (int i = 0; i < kLayers; ++i)
      register_module(str(i % 2 == 0 ? "in" : "out", i),
                      torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
};

TrainingOptions options_of(int world) {
  Config config = default_config(world, {.tensor = kTensor});
  config.pager.stage = 3;
  config.pager.gather = GatherPolicy::kCopy;
  config.pager.live_bytes = 1;
  config.pager.units.merge_below_bytes = 0;
  config.tensor.partition_config =
      PartitionConfig{.layer_specs = {{.patterns = {R"(in\d+\.weight)"}},
                                      {.patterns = {R"(out\d+\.weight)"}, .type = TensorLayerSpec::Type::kRow}}};
  return {.config = config};
}

TEST(Memory, OfSlicesThatInitHasShardedIsNeverMoreThanShardsAndAFewLayers) {
  at::set_num_threads(1);
  run_ranks(kTensor * kData, [](Rank& rank) {
    manual_seed(1);
    const testing::LiveBytes memory;
    std::unique_ptr<Net> net;
    {
      const zero::Init scope(rank.world(), {.live_bytes = 1});
      net = std::make_unique<Net>();
    }
    Training training(rank.world(), *net, options_of(rank.size()));
    const int64_t shards = kLayers * kLayerBytes / rank.size();
    EXPECT_GE(memory.peak_bytes(), shards + kLayerBytes);
    // Weights and gradients; of layers the whole one, its slice, and what the pager gathers of another slice.
    EXPECT_LE(memory.peak_bytes(), 2 * shards + 3 * kLayerBytes);
    EXPECT_LT(2 * shards + 3 * kLayerBytes, kLayers * kLayerBytes / kTensor);
  });
}

}  // namespace
}  // namespace trireme::slices_memory
