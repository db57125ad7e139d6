// The core of a step: for any gradients, over all ranks of a model, which may be more than those that share its shards.
#include "trireme/step/train_step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/step/stage.h"
#include "tests/support/error_of.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using namespace testing;

TEST(ATrainStep, TrainsFromOutputsAndTheirGradients) {
  run_ranks(1, [](Rank& rank) {
    Stage stage(rank.world(), rank.world(), 1);
    stage.backward(0.25);
    const StepReport report = stage.step.step();
    EXPECT_TRUE(report.ended_window);
    EXPECT_EQ(report.applied, true);
    EXPECT_EQ(stage.value(), 0.75);
    EXPECT_EQ(stage.step.outcome().norm, 0.25);
  });
}

TEST(ATrainStep, InsideAWindowOnlyCounts) {
  run_ranks(1, [](Rank& rank) {
    Stage stage(rank.world(), rank.world(), 1, {.accumulation_steps = 2});
    stage.backward(0.25);
    const StepReport inside = stage.step.step();
    EXPECT_FALSE(inside.ended_window);
    EXPECT_EQ(inside.applied, std::nullopt);
    EXPECT_EQ(stage.value(), 1);
    stage.backward(0.25);
    EXPECT_TRUE(stage.step.step().ended_window);
    EXPECT_EQ(stage.value(), 0.75);
  });
}

/// Runs `body` on 2 x 2 ranks: two stages, each over two data-parallel ranks. On `device`s if so.
void with_stages(bool on_devices, const std::function<void(int, Group& data, Group& model, c10::Device)>& body) {
  run_ranks(4, [&](Rank& rank) {
    const int number = rank.id() / 2;
    const std::unique_ptr<Group> data = rank.world().split({{0, 1}, {2, 3}}, "data");
    if (!on_devices) return body(number, *data, rank.world(), c10::kCPU);
    const c10::Device device = fake_device(rank.id());
    const auto model = make_fake_nccl_group(rank.world(), device);
    const auto there = make_fake_nccl_group(*data, device);
    body(number, *there, *model, device);
  });
}

class Stages : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(TrainStep, Stages, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "OnDevices" : "OnTheHost"; });

TEST_P(Stages, ClipByTheNormOfTheWholeModel) {
  FakeRecord record;
  with_stages(GetParam(), [](int number, Group& data, Group& model, c10::Device device) {
    // One gradient of 3 and four of 2: the norm is 5.
    Stage stage(data, model, number == 0 ? 1 : 4, {.max_norm = 2.5}, {}, device);
    stage.backward(number == 0 ? 3 : 2);
    (void)stage.step.step();
    EXPECT_EQ(stage.step.outcome().norm, 5);
    EXPECT_NEAR(stage.value(), 1 - 0.5 * (number == 0 ? 3 : 2), 1e-6);  // clip_grad_norm_ adds 1e-6 to the norm
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST_P(Stages, SkipAStepTogether) {
  FakeRecord record;
  with_stages(GetParam(), [](int number, Group& data, Group& model, c10::Device device) {
    Stage stage(data, model, 1, {}, {}, device);
    stage.backward(number == 0 ? std::numeric_limits<double>::infinity() : 1);
    (void)stage.step.step();
    EXPECT_FALSE(stage.step.was_applied());
    EXPECT_EQ(stage.value(), 1);
    EXPECT_EQ(stage.step.progress().skipped_steps, 1);
  });
}

TEST_P(Stages, ThrowTogetherWhereOneLacksAGradient) {
  FakeRecord record;
  with_stages(GetParam(), [](int number, Group& data, Group& model, c10::Device device) {
    Stage stage(data, model, 1, {.ignore_unused_parameters = false}, {}, device);
    if (number == 0) stage.backward(1);
    const std::string text = error_of<StateError>([&] { (void)stage.step.step(); });
    EXPECT_SAYS(text, number == 0 ? "step: a parameter of rank 2, which names it, got no gradient on any rank"
                                  : "step: parameter 'w0.weight' got no gradient on any rank");
    stage.backward(0.5);  // the gradients of the step that threw are gone
    (void)stage.step.step();
    EXPECT_EQ(stage.value(), 0.5);
  });
}

TEST_P(Stages, StepWhereOneHasNoGradientAtAll) {
  FakeRecord record;
  with_stages(GetParam(), [](int number, Group& data, Group& model, c10::Device device) {
    Stage stage(data, model, 1, {}, {}, device);
    if (number == 0) stage.backward(0.5);
    (void)stage.step.step();
    EXPECT_EQ(stage.value(), number == 0 ? 0.5 : 1);
    EXPECT_SAYS(error_of<StateError>([&] { (void)stage.step.step(); }), "no parameter got a gradient on any rank");
  });
}

TEST_P(Stages, AgreeByTwoCollectives) {
  FakeRecord record;
  with_stages(GetParam(), [](int, Group& data, Group& model, c10::Device device) {
    Stage stage(data, model, 2, {}, {}, device);
    for (int i = 0; i < 3; ++i) {
      stage.backward(1);
      const int64_t of_model = model.counters().calls, of_data = data.counters().calls;
      (void)stage.step.step();
      EXPECT_EQ(model.counters().calls, of_model + (device.is_cpu() ? 1 : 2));  // norm and flags: on the host in one
      EXPECT_EQ(
          data.counters().calls,
          of_data + (device.is_cpu() ? 2 : 1));  // the user's writes, and buffers; reductions have their own group
    }
  });
}

TEST(ATrainStep, WithALossScaleRefusesGradientsThatWereNotScaled) {
  run_ranks(1, [](Rank& rank) {
    TrainStepOptions options;
    options.precision.weight_dtype = at::kHalf;  // the weights' own dtype does not matter here
    options.precision.loss_scale.initial_scale_power = 3;
    Stage stage(rank.world(), rank.world(), 1, options);
    EXPECT_EQ(stage.step.loss_scale(), 8);
    EXPECT_SAYS(error_of<StateError>([&] { stage.weights[0].sum().backward(); }), "the scale is 8");
    stage.step.scale(stage.weights[0].sum()).backward();
    (void)stage.step.step();
    EXPECT_EQ(stage.step.outcome().norm, 1);
    EXPECT_EQ(stage.value(), 0);
  });
}

}  // namespace
}  // namespace trireme
