// Micro-batches that take turns on a stage: the bits of one process, whatever way each of them goes.
#include <ATen/ops/equal.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/nn/modules.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/pipeline/step_engine.h"

namespace trireme::testing {
namespace step_turns {

namespace nn = torch::nn;
using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int kMicroBatches = 6, kSteps = 4;

/// Layers of which the even ones are on stage 0, and a sum that a program may keep there.
struct Net : nn::Module {
  Net() {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(6, 6)));
    norm = register_module("norm", nn::BatchNorm1d(6));
    kept = register_buffer("kept", at::zeros({6}));
  }
  std::vector<nn::Linear> layers;
  nn::BatchNorm1d norm{nullptr};
  Tensor kept;
};

int stage_of(const std::string& name) { return name.starts_with("layer1") || name.starts_with("layer3") ? 1 : 0; }

/// The loss of a micro-batch of a step.
using Program = std::function<Tensor(Net& net, const Tensor& x, int step, int micro_batch)>;
/// Samples of a micro-batch.
using Samples = std::function<int(int step, int micro_batch)>;

Config config_of_step() {
  Config config;
  config.batch = {.train_batch_size = 3 * kMicroBatches,
                  .train_micro_batch_size_per_gpu = 3,
                  .gradient_accumulation_steps = kMicroBatches};
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 0.01};
  config.gradient_clipping = 0.0;
  return config;
}

struct Trained {
  std::map<std::string, Tensor> tensors;
  std::vector<Tensor> losses;
  std::vector<std::string> pipelines;
  bool operator==(const Trained& other) const {
    const auto are_equal = [](const auto& one, const auto& two) { return at::equal(one, two); };
    return losses.size() == other.losses.size() &&
           std::equal(losses.begin(), losses.end(), other.losses.begin(), are_equal) &&
           std::equal(tensors.begin(), tensors.end(), other.tensors.begin(), other.tensors.end(),
                      [&](const auto& one, const auto& two) { return are_equal(one.second, two.second); });
  }
};

Trained train(
    int stages, const Program& program, const std::string& pipeline = "interleaved",
    const Samples& samples = [](int, int) { return 3; }) {
  Trained trained;
  std::mutex mutex;
  run_ranks(stages, [&](Rank& rank) {
    manual_seed(3);
    Net net;
    StepEngine engine(rank.world(), Topology({{"pipe", stages}, {"data", 1}}), net, stage_of, {.pipeline = pipeline},
                      {.config = config_of_step()});
    for (int step = 0; step < kSteps; ++step) {
      const auto outputs = engine.step(kMicroBatches, [&](int micro_batch) {
        at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + micro_batch);
        const Tensor x = at::randn({samples(step, micro_batch), 6}, generator);
        const Tensor loss = program(net, x, step, micro_batch);
        engine.backward(loss);
        return Tensors{loss};
      });
      engine.update();
      if (rank.id() != 0) continue;
      trained.pipelines.push_back(engine.runner().pipeline());
      for (const Tensors& of_micro_batch : outputs) trained.losses.push_back(of_micro_batch.at(0));
    }
    std::map<std::string, Tensor> own;
    for (const auto& parameter : engine.module().named_parameters())
      own[parameter.key()] = parameter.value().detach().clone();
    for (const auto& buffer : engine.module().named_buffers()) own[buffer.key()] = buffer.value().clone();
    const std::lock_guard lock(mutex);
    trained.tensors.insert(own.begin(), own.end());
    engine.destroy();
  });
  return trained;
}

Tensor layer(Net& net, int number, const Tensor& x) { return at::tanh(net.layers[number]->forward(x)); }
Tensor there_and_back(Net& net, const Tensor& x) { return layer(net, 2, layer(net, 1, layer(net, 0, x))); }

void expect_same(
    const Program& program, const std::string& last_pipeline, const Samples& samples = [](int, int) { return 3; }) {
  const Trained expected = train(1, program, "interleaved", samples);
  for (const std::string pipeline : {"interleaved", "simple", "sequential"}) {
    const Trained found = train(2, program, pipeline, samples);
    EXPECT_TRUE(found == expected) << pipeline;
    EXPECT_EQ(found.pipelines.front(), "sequential");
    EXPECT_EQ(found.pipelines.back(), last_pipeline == "turns" ? pipeline : "sequential");
  }
}

TEST(StepTurns, AProgramThatComesBackHasTheBitsOfOneProcess) {
  expect_same([](Net& net, const Tensor& x, int, int) { return there_and_back(net, x).square().mean(); }, "turns");
  expect_same(
      [](Net& net, const Tensor& x, int, int) {
        const Tensor first = layer(net, 0, x), back = layer(net, 2, layer(net, 1, first));
        return (layer(net, 1, layer(net, 0, layer(net, 3, back + first))) + back).square().mean();
      },
      "turns");
}

/// Statistics that one turn writes.
TEST(StepTurns, StatisticsOfOneTurnAreThoseOfOneProcess) {
  expect_same(
      [](Net& net, const Tensor& x, int, int) {
        const Tensor first = net.norm->forward(layer(net, 0, x));
        return layer(net, 2, layer(net, 1, first)).square().mean();
      },
      "turns");
}

/// Statistics of two turns would be written by the first turn of the next micro-batch before the second one.
TEST(StepTurns, StatisticsOfTwoTurnsRunOneByOne) {
  expect_same(
      [](Net& net, const Tensor& x, int, int) {
        const Tensor first = net.norm->forward(layer(net, 0, x));
        return net.norm->forward(layer(net, 2, layer(net, 1, first))).square().mean();
      },
      "sequential");
}

/// Where they go depends on values: on no plan.
TEST(StepTurns, BranchesByValuesHaveTheBitsOfOneProcess) {
  expect_same(
      [](Net& net, const Tensor& x, int, int) {
        Tensor h = there_and_back(net, x);
        if (h.sum().item<float>() > 0) h = layer(net, 3, h);
        if (h.mean().item<float>() > 0.05) h = layer(net, 2, h) + layer(net, 1, h);
        return h.square().mean();
      },
      "turns");
}

/// A program of another way in some steps, of which no value tells: stages that all wait go on one by one.
TEST(StepTurns, OtherTurnsThanTheStepBeforeHaveTheBitsOfOneProcess) {
  expect_same(
      [](Net& net, const Tensor& x, int step, int micro_batch) {
        Tensor h = there_and_back(net, x);
        if (step % 2 == 1 && micro_batch % 2 == 0) h = layer(net, 2, layer(net, 3, h));
        if (step == 2) h = layer(net, 3, h);
        return h.square().mean();
      },
      "turns");
}

TEST(StepTurns, NewSizesHaveTheBitsOfOneProcess) {
  expect_same([](Net& net, const Tensor& x, int, int) { return there_and_back(net, x).square().mean(); }, "turns",
              [](int step, int micro_batch) { return 2 + step + (micro_batch * 7 + step) % 5; });
}

/// Every stage is told what one of them threw, and no thread is left.
TEST(StepTurns, AnErrorOfOneForwardPassEndsTheStepOnEveryStage) {
  for (const int failing : {0, 1}) {
    std::vector<std::string> errors(2);
    run_ranks(2, [&](Rank& rank) {
      errors[rank.id()] = error_of<std::exception>([&] {
        manual_seed(3);
        Net net;
        StepEngine engine(rank.world(), Topology({{"pipe", 2}, {"data", 1}}), net, stage_of, {},
                          {.config = config_of_step()});
        for (int step = 0; step < kSteps; ++step) {
          engine.step(kMicroBatches, [&](int micro_batch) {
            const Tensor loss = there_and_back(net, at::ones({3, 6})).square().mean();
            if (step == 2 && micro_batch == 3 && rank.id() == failing) throw std::runtime_error("the disk is gone");
            engine.backward(loss);
            return Tensors{loss};
          });
          engine.update();
        }
      });
    });
    EXPECT_NE(errors[failing].find("the disk is gone"), std::string::npos) << errors[failing];
    EXPECT_NE(errors[1 - failing].find("the disk is gone"), std::string::npos) << errors[1 - failing];
    EXPECT_NE(errors[1 - failing].find("micro-batch 3"), std::string::npos) << errors[1 - failing];
  }
}

/// A tensor that a program begins to keep when its micro-batches take turns already.
TEST(StepTurns, WhatALaterMicroBatchHasUsedIsNotWritten) {
  const auto keep_later = [](Net& net, const Tensor& x, int step, int) {
    Tensor h = layer(net, 0, x);
    if (step > 1) h = h - net.kept;
    h = layer(net, 2, layer(net, 1, h));
    if (step > 1) {
      const at::NoGradGuard no_grad;
      net.kept.mul_(0.5).add_(h.detach().mean(0));
    }
    return h.square().mean();
  };
  const std::string text = error_of<std::exception>([&] { (void)train(2, keep_later); });
  EXPECT_NE(text.find("a later micro-batch has used before it"), std::string::npos) << text;
  EXPECT_NE(text.find("\"pipeline\": \"sequential\""), std::string::npos) << text;
}

}  // namespace step_turns
}  // namespace trireme::testing
