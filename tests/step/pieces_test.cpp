// A micro-batch's backward in pieces, as stages of a step function run it, is one backward pass to everything behind
// it.
#include <ATen/ops/equal.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/step/stage.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/step/train_step.h"

namespace trireme {
namespace {

using namespace testing;
using torch::autograd::impl::gradient_edge;

constexpr int kLayers = 4, kMicroBatches = 2, kSteps = 2;

enum class Way {
  kAtOnce,
  kInPieces,
  kAtOnceOfTheSecondHalf,  ///< the first half gets no gradient
  kInPiecesOfTheSecondHalf,
};

/// Four layers, of which the last two are a piece of backward and the first two another one.
class Net {
 public:
  Net(Group& data, const PagerPolicy& policy)
      : pager_(data, named(), with_small_units(policy)),
        buffers_(data, c10::kCPU, [] { return std::vector<NamedBuffer>(); }),
        step({.shards = data,
              .model = data,
              .place = {data.rank(), data.size()},
              .pager = pager_,
              .buffers = buffers_,
              .optimizer = sgd(pager_, data, 0.5),
              .hyperparameters = Hyperparameters({{.kind = OptimizerKind::kSgd, .lr = 0.5}}, LrScheduleOptions{})},
             {.accumulation_steps = kMicroBatches}) {}

  void backward(const at::Tensor& x, Way way) {
    const at::Tensor h = through(0, x);
    if (way == Way::kAtOnce || way == Way::kAtOnceOfTheSecondHalf) {
      const at::Tensor loss = through(2, way == Way::kAtOnce ? h : h.detach()).square().mean();
      return step.backward_from({gradient_edge(loss)}, {at::ones_like(loss)}, {.ends_micro_batch = true});
    }
    const at::Tensor leaf = h.detach().requires_grad_();
    const at::Tensor loss = through(2, leaf).square().mean();
    step.backward_from({gradient_edge(loss)}, {at::ones_like(loss)}, {.goes_on = true});
    if (way == Way::kInPieces)
      step.backward_from({gradient_edge(h)}, {leaf.grad()}, {.ends_micro_batch = true});
    else
      step.backward_from({}, {}, {.ends_micro_batch = true});
  }

  int64_t reductions() const { return pager_.counters().reductions; }
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < pager_.parameters().size(); ++i)
      all.push_back(pager_.whole(static_cast<int>(i)).detach().clone());
    return all;
  }

 private:
  static PagerPolicy with_small_units(PagerPolicy policy) {
    policy.units = {.merge_below_bytes = 0};
    policy.live_bytes = 0;
    policy.poison = true;
    return policy;
  }
  std::vector<NamedParameter> named() {
    manual_seed(3);
    std::vector<NamedParameter> all;
    for (int i = 0; i < kLayers; ++i) {
      layers_.emplace_back(8, 8);
      for (const auto& item : layers_.back()->named_parameters())
        all.push_back({"layer" + std::to_string(i) + "." + item.key(), item.value()});
    }
    return all;
  }
  at::Tensor through(size_t first, at::Tensor x) {
    for (size_t i = first; i < first + 2; ++i) x = at::tanh(layers_[i]->forward(x));
    return x;
  }

  std::vector<torch::nn::Linear> layers_;
  Pager pager_;
  Buffers buffers_;

 public:
  TrainStep step;
};

struct Trained {
  std::vector<at::Tensor> weights;
  std::vector<double> norms;
};

Trained train(Group& data, const PagerPolicy& policy, Way way) {
  Net net(data, policy);
  Trained trained;
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kMicroBatches; ++i) {
      manual_seed(100 * step + 10 * i + data.rank());
      net.backward(at::randn({5, 8}), way);
    }
    (void)net.step.end_window();
    trained.norms.push_back(*net.step.outcome().norm);
  }
  trained.weights = net.weights();
  return trained;
}

struct Case {
  const char* name;
  PagerPolicy policy;
};

class InPieces : public ::testing::TestWithParam<Case> {
 protected:
  void expect_same(Way pieces, Way at_once) {
    run_ranks(2, [&](Rank& rank) {
      const Trained found = train(rank.world(), GetParam().policy, pieces);
      const Trained expected = train(rank.world(), GetParam().policy, at_once);
      EXPECT_EQ(found.norms, expected.norms);
      EXPECT_GT(found.norms.front(), 0);
      for (size_t i = 0; i < expected.weights.size(); ++i)
        EXPECT_TRUE(at::equal(found.weights[i], expected.weights[i])) << i;
    });
  }
};

TEST_P(InPieces, ABackwardHasTheBitsOfOneAtOnce) { expect_same(Way::kInPieces, Way::kAtOnce); }

TEST_P(InPieces, APieceThatReachesNothingEndsThePass) {
  expect_same(Way::kInPiecesOfTheSecondHalf, Way::kAtOnceOfTheSecondHalf);
}

INSTANTIATE_TEST_SUITE_P(
    Backward, InPieces,
    ::testing::Values(Case{"Zero0", {.stage = 0}}, Case{"Zero1", {.stage = 1}}, Case{"Zero2", {.stage = 2}},
                      Case{"Zero3Shared", {.stage = 3, .gather = GatherPolicy::kShared}},
                      Case{"Zero3Copy", {.stage = 3, .gather = GatherPolicy::kCopy}},
                      Case{"Zero0Deterministic", {.stage = 0, .deterministic = true}},
                      Case{"Zero3Deterministic", {.stage = 3, .gather = GatherPolicy::kCopy, .deterministic = true}}),
    [](const auto& info) { return info.param.name; });

// Gradients that are reduced in each pass are sent once per unit and pass, however many pieces there are.
TEST(APiece, SendsNoUnitBeforeItsTime) {
  run_ranks(2, [](Rank& rank) {
    const auto reductions = [&](Way way) {
      Net net(rank.world(), {.stage = 2});
      manual_seed(rank.id());
      net.backward(at::randn({5, 8}), way);
      return net.reductions();
    };
    EXPECT_EQ(reductions(Way::kInPieces), reductions(Way::kAtOnce));
  });
}

TEST(APiece, IsNoPassOfItsOwn) {
  run_ranks(2, [](Rank& rank) {
    Stage stage(rank.world(), rank.world(), 2, {.micro_batch_size = 3, .managed_accumulation = false});
    for (const bool goes_on : {true, true, false}) {
      const at::Tensor output = 2 * stage.weights[goes_on ? 0 : 1];
      stage.step.backward_from({gradient_edge(output)}, {at::ones_like(output)}, {.goes_on = goes_on});
    }
    // Weight 0, which two of the pieces reach, has two gradients: as of a direct backward() they are counted.
    (void)stage.step.step();
    EXPECT_EQ(stage.step.progress().global_samples, 2 * 2 * 3);
    const at::Tensor first = 2 * stage.weights[0], second = 2 * stage.weights[1];
    stage.step.backward_from({gradient_edge(first)}, {at::ones_like(first)}, {.goes_on = true});
    stage.step.backward_from({gradient_edge(second)}, {at::ones_like(second)}, {});
    (void)stage.step.step();
    EXPECT_EQ(stage.step.progress().global_samples, 2 * 2 * 3 + 2 * 3);
  });
}

TEST(APiece, ThatEndsItsMicroBatchIsTheLastOne) {
  run_ranks(1, [](Rank& rank) {
    Stage stage(rank.world(), rank.world(), 1);
    EXPECT_SAYS(error_of<Error>([&] { stage.step.backward_from({}, {}, {.ends_micro_batch = true, .goes_on = true}); }),
                "a piece ends its micro-batch, and another one is to follow");
  });
}

TEST(GradientsOfAWindow, AreDividedByAnotherNumberWhereThatIsAsked) {
  run_ranks(1, [](Rank& rank) {
    Stage stage(rank.world(), rank.world(), 1, {.accumulation_steps = 4});
    const auto window = [&] {
      const double before = stage.value();
      for (int i = 0; i < 4; ++i) {
        stage.backward(0.25);
        (void)stage.step.step();
      }
      return before - stage.value();
    };
    EXPECT_EQ(window(), 0.25);
    stage.step.divide_gradients_by(1);
    EXPECT_EQ(window(), 1);
    stage.step.divide_gradients_by(2);
    EXPECT_EQ(window(), 0.5);
    stage.step.set_batch(1, 4);  // stays
    EXPECT_EQ(window(), 0.5);
    stage.step.divide_gradients_by({});
    EXPECT_EQ(window(), 0.25);
  });
}

}  // namespace
}  // namespace trireme
