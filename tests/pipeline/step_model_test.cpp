// SageMaker's names for a step function: partitions by hand, parts of a batch, and what comes back.
#include "trireme/pipeline/step_model.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mse_loss.h>
#include <gtest/gtest.h>
#include <torch/nn/modules.h>

#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "trireme/intercept/random_streams.h"

namespace trireme::testing {
namespace step_model {

namespace nn = torch::nn;
using at::Tensor;

struct Block : nn::Module {
  nn::Linear up{register_module("up", nn::Linear(4, 8))}, down{register_module("down", nn::Linear(8, 4))};
};
struct Net : nn::Module {
  std::shared_ptr<Block> a = register_module("a", std::make_shared<Block>());
  std::shared_ptr<Block> ab = register_module("ab", std::make_shared<Block>());
  Tensor forward(const Tensor& x) { return ab->down(ab->up(a->down(a->up(x)).tanh()).tanh()); }
};

TEST(Partition, TheInnermostModuleCounts) {
  smp::Partition partition(1);
  partition.set_partition("a", 0);
  partition.set_partition("a.down", 2);
  partition.set_partition("a.down.bias", 3);
  EXPECT_EQ(partition("a.up.weight"), 0);
  EXPECT_EQ(partition("a.down.weight"), 2);
  EXPECT_EQ(partition("a.down.bias"), 3);
  EXPECT_EQ(partition("ab.up.weight"), 1);
  EXPECT_EQ(partition.stages(), 4);
  partition.set_partition("a.down", 1);
  EXPECT_EQ(partition("a.down.weight"), 1);
  EXPECT_NO_THROW(partition.require_part_of(Net()));
  partition.set_partition("c", 1);
  EXPECT_SAYS(error_of<ConfigError>([&] { partition.require_part_of(Net()); }),
              "set_partition('c', 1): the model has no parameter or buffer there");
}

TEST(StepOutput, IsMergedOverMicroBatches) {
  const smp::StepOutput output({at::arange(2.), at::arange(2.) + 1, at::arange(2.) + 2});
  EXPECT_TRUE(at::equal(output.reduce_sum(), at::arange(2.) * 3 + 3));
  EXPECT_TRUE(at::equal(output.reduce_mean(), at::arange(2.) + 1));
  EXPECT_EQ(output.concat().sizes(), (std::vector<int64_t>{6}));
  EXPECT_EQ(output.stack().sizes(), (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(output.outputs().size(), 3U);
}

InitializeOptions options(int data) {
  Config config;
  config.batch = {.train_batch_size = 8 * data, .train_micro_batch_size_per_gpu = 2, .gradient_accumulation_steps = 4};
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 0.05};
  return {.config = config};
}

/// The mean losses of three steps over `ranks` ranks; `weights` [4] of the outputs are the same for every micro-batch.
std::vector<double> losses_of(int ranks, int stages, const Tensor& weights = {}) {
  std::vector<double> losses;
  run_ranks(ranks, [&](Rank& rank) {
    manual_seed(2);
    Net net;
    smp::Partition partition;
    if (stages > 1) partition.set_partition("ab", 1);
    smp::DistributedModel model(rank.world(), net, partition, options(ranks / stages));
    for (int step = 0; step < 3; ++step) {
      const Tensor x = at::arange(32.).view({8, 4}) / 32;
      const auto outputs = model.step({x, x * step}, [&](const std::vector<Tensor>& part) {
        EXPECT_EQ(part[0].size(0), 2);
        const Tensor out = net.forward(part[0]);
        const Tensor loss = at::mse_loss(weights.defined() ? out * weights : out, part[1]);
        model.backward(loss);
        return std::vector{loss, out};
      });
      model.update();
      EXPECT_EQ(outputs.size(), 2U);
      EXPECT_EQ(outputs[1].concat().sizes(), x.sizes());
      if (rank.id() == ranks - 1) losses.push_back(outputs[0].reduce_mean().item<double>());
    }
    model.destroy();
  });
  return losses;
}

TEST(DistributedModel, TrainsAsWithoutStages) {
  const std::vector<double> expected = losses_of(1, 1);
  EXPECT_EQ(losses_of(2, 2), expected);
  EXPECT_EQ(losses_of(4, 2), expected);  // both replicas have the same samples
}

TEST(DistributedModel, HasTensorsThatTheFunctionCapturesInEveryMicroBatch) {
  const Tensor weights = at::arange(4.) + 0.5;
  const std::vector<double> expected = losses_of(1, 1, weights);
  EXPECT_NE(expected, losses_of(1, 1));
  EXPECT_EQ(losses_of(2, 2, weights), expected);
}

TEST(DistributedModel, RefusesWhatDoesNotDivide) {
  run_ranks(2, [](Rank& rank) {
    Net net;
    smp::Partition partition;
    partition.set_partition("ab", 2);
    EXPECT_SAYS(error_of<ConfigError>([&] { smp::DistributedModel(rank.world(), net, partition, options(1)); }),
                "the partition has stages 0 to 2, and 2 ranks are no multiple of 3");
    partition.set_partition("ab", 1);
    smp::DistributedModel model(rank.world(), net, partition, options(1));
    EXPECT_SAYS(error_of<ShapeError>(
                    [&] { (void)model.step({at::arange(6.)}, [](const std::vector<Tensor>& part) { return part; }); }),
                "step: input 0 of sizes [6] cannot be cut along dim 0 into 4 micro-batches");
    model.destroy();
  });
}

}  // namespace step_model
}  // namespace trireme::testing
