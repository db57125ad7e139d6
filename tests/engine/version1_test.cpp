// A checkpoint that Trireme wrote in format version 1 loads with every value it holds.
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/engine/dot.h"
#include "tests/engine/version1_net.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/source.h"
#include "trireme/checkpoint/training_values.h"

namespace trireme {
namespace {

using testing::TemporaryFolder;

const std::filesystem::path kFixtures =
    std::filesystem::path(__FILE__).parent_path().parent_path() / "checkpoint/fixtures";

using Tensors = std::map<std::string, at::Tensor>;

Tensors tensors_of(const CheckpointSource& source) {
  TensorReader reader(source);
  Tensors tensors;
  for (size_t i = 0; i < source.manifest.tensors.size(); ++i) {
    const SavedTensor& saved = source.manifest.tensors[i];
    tensors[saved.name] = at::empty(saved.shape, saved.dtype);
    reader.read(i, 0, tensors[saved.name].numel(), static_cast<std::byte*>(tensors[saved.name].data_ptr()));
  }
  return tensors;
}

/// AdamW over version1::kSteps steps of a gradient that does not change, in fp64.
void expect_trained(const Tensors& found, const std::string& name, std::vector<int64_t> shape, double lr,
                    double weight_decay) {
  at::Tensor weight = version1::ramp(shape).to(at::kDouble);
  const at::Tensor gradient = version1::slope(shape).to(at::kDouble);
  at::Tensor first = at::zeros_like(weight), second = at::zeros_like(weight);
  for (int step = 1; step <= version1::kSteps; ++step) {
    first = 0.5 * first + 0.5 * gradient;
    second = 0.75 * second + 0.25 * gradient * gradient;
    const at::Tensor unbiased = first / (1 - std::pow(0.5, step));
    weight = weight * (1 - lr * weight_decay) - lr * unbiased / ((second / (1 - std::pow(0.75, step))).sqrt() + 1e-8);
  }
  // fp32 rounds a few times a step.
  const auto same = [&](const std::string& key, const at::Tensor& expected) {
    ASSERT_TRUE(found.contains(key)) << key;
    EXPECT_TRUE(at::allclose(found.at(key).to(at::kDouble), expected, 1e-6, 1e-6)) << key;
  };
  same("master." + name, weight);
  same("optimizer.exp_avg." + name, first);
  same("optimizer.exp_avg_sq." + name, second);
  EXPECT_TRUE(at::equal(found.at("model." + name), found.at("master." + name).to(at::kHalf))) << name;
}

void expect_everything(const CheckpointSource& source) {
  const Tensors found = tensors_of(source);
  EXPECT_EQ(found.size(), 15u);
  expect_trained(found, "weight", {3, 5}, 0.125, 0.25);
  expect_trained(found, "embed.weight", {7, 2}, 0.125, 0.25);
  expect_trained(found, "bias", {5}, 0.25, 0);
  EXPECT_TRUE(at::equal(found.at("model.frozen"), version1::ramp({2, 2}).to(at::kHalf)));
  EXPECT_TRUE(at::equal(found.at("model.scale"), version1::ramp({3})));
  EXPECT_EQ(found.at("model.count").item<int64_t>(), 11);

  const TrainingValues values = training_values(source.manifest);
  EXPECT_EQ(values.global_steps, version1::kSteps);
  EXPECT_EQ(values.micro_steps, version1::kSteps);
  EXPECT_EQ(values.skipped_steps, 0);
  EXPECT_EQ(values.global_samples, 2 * version1::kSteps);
  EXPECT_EQ(values.steps,
            (std::map<std::string, int64_t>{{"bias", 3}, {"embed.weight", 3}, {"frozen", 0}, {"weight", 3}}));
  EXPECT_EQ(values.aliases, (std::map<std::string, std::string>{{"head.weight", "embed.weight"}}));
  ASSERT_EQ(values.groups.size(), 2u);
  EXPECT_EQ(values.groups[0].names, (std::vector<std::string>{"weight", "embed.weight"}));
  EXPECT_EQ(values.groups[1].names, std::vector<std::string>{"bias"});
  EXPECT_EQ(values.group_lrs, (std::vector<double>{0.125, 0.25}));
  ASSERT_TRUE(values.loss_scaler);
  EXPECT_EQ(values.loss_scaler->scale, 16);
  EXPECT_EQ(values.loss_scaler->steps, 3);
  EXPECT_EQ(Json::parse(*values.client_state), (Json{{"epoch", 7}}));
}

TEST(Version1, HoldsWhatWasTrained) {
  const CheckpointSource source = open_checkpoint(kFixtures, "version1");
  EXPECT_EQ(source.manifest.version, 1);
  EXPECT_EQ(source.manifest.topology, (std::vector<Axis>{{"data", 2}}));
  expect_everything(source);
}

TEST(Version1, LoadsIntoAnEngineThatSavesItAgainInThisVersion) {
  for (const int ranks : {1, 2, 3})
    for (const int stage : {0, 3}) {
      SCOPED_TRACE(str(ranks, " ranks, stage ", stage));
      TemporaryFolder folder;
      run_ranks(ranks, [&](Rank& rank) {
        version1::Net net(/*seed=*/5);
        Engine engine(rank.world(), net, version1::options(ranks, stage));
        const auto loaded = engine.load_checkpoint(kFixtures, {.tag = "version1"});
        ASSERT_TRUE(loaded);
        EXPECT_EQ(Json::parse(loaded->client_state), (Json{{"epoch", 7}}));
        EXPECT_EQ(engine.global_steps(), version1::kSteps);
        EXPECT_EQ(engine.get_lr(1), 0.25);
        (void)engine.save_checkpoint(folder.path(), {.tag = "again", .client_state = loaded->client_state});
      });
      const CheckpointSource again = open_checkpoint(folder.path(), "again");
      EXPECT_EQ(again.manifest.version, kManifestVersion);
      expect_everything(again);
    }
}

}  // namespace
}  // namespace trireme
