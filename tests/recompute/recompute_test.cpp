#include "trireme/recompute/recompute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <thread>
#include <tuple>

#include "tests/recompute/gradients.h"
#include "tests/support/draw_from_slice.h"
#include "tests/support/live_bytes.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

using namespace testing;

Gradients gradients(const at::Tensor& loss, const std::vector<at::Tensor>& inputs, bool retain_graph = false) {
  return torch::autograd::grad({loss}, inputs, {}, retain_graph);
}

/// The message of the Error that `call` throws, and its type.
template <class Exception>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// Two products with something pointwise in between.
struct Layer {
  at::Tensor weight = at::randn({6, 6}).requires_grad_();
  int calls = 0;
  at::Tensor operator()(const at::Tensor& x) {
    ++calls;
    return at::linear(at::tanh(at::linear(x, weight)), weight);
  }
};

class Recompute : public ::testing::Test {
 protected:
  /// Without a copy: counts the calls of `layer`.
  auto call_of(Layer& of) {
    return [&of](const at::Tensor& t) { return of(t); };
  }

  Layer layer;
  Layer second;
  at::Tensor x = at::randn({4, 6}).requires_grad_();
};

TEST_F(Recompute, GivesTheGradientsOfAPlainCall) {
  const auto expected = gradients(layer(x).sum(), {x, layer.weight});
  layer.calls = 0;
  const auto y = recompute(call_of(layer), x);
  expect_equal(gradients(y.sum(), {x, layer.weight}), expected);
  EXPECT_EQ(layer.calls, 2);
}

TEST_F(Recompute, KeepsNothingButItsInputs) {
  const auto input = at::randn({64, 256});
  const auto weight = at::randn({256, 256}).requires_grad_();
  const LiveBytes live;
  const auto y = recompute(
      [weight](at::Tensor t) {
        for (int i = 0; i < 8; ++i) t = at::tanh(at::linear(t, weight));
        return t.sum();
      },
      input);
  // The result, and the state of the generator.
  EXPECT_LT(live.bytes(), 8192);
  (void)y;
}

TEST_F(Recompute, SecondBackwardRecomputesAgain) {
  const auto expected = gradients(layer(x).sum(), {x, layer.weight});
  layer.calls = 0;
  const auto y = recompute(call_of(layer), x).sum();
  expect_equal(gradients(y, {x, layer.weight}, true), expected);
  expect_equal(gradients(y, {x, layer.weight}, true), expected);
  expect_equal(gradients(y, {x, layer.weight}), expected);
  EXPECT_EQ(layer.calls, 4);
}

TEST_F(Recompute, GradientsOfGradientsAreThoseOfAPlainCall) {
  const auto penalty = [&](const at::Tensor& y) {
    const auto first = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    return gradients(first.square().sum(), {x, layer.weight});
  };
  const auto expected = penalty(layer(x));
  expect_equal(penalty(recompute(call_of(layer), x)), expected);
}

TEST_F(Recompute, InnerCallsAreRecomputedFromRecomputedInputs) {
  const auto expected = gradients(layer(second(layer(x))).sum(), {x, layer.weight, second.weight});
  layer.calls = second.calls = 0;
  const auto y = recompute(
      [&](const at::Tensor& outer) {
        const auto a = layer(outer);
        const auto b = recompute(call_of(second), a);
        return layer(b);
      },
      x);
  expect_equal(gradients(y.sum(), {x, layer.weight, second.weight}), expected);
  // In forward; when the outer one is recomputed; from the input that this gave.
  EXPECT_EQ(second.calls, 3);
}

TEST_F(Recompute, NestedInputsAreNotKept) {
  const auto input = at::randn({64, 256});
  const auto weight = at::randn({256, 256}).requires_grad_();
  const LiveBytes live;
  const auto y = recompute(
      [weight](at::Tensor t) {
        for (int i = 0; i < 4; ++i)
          t = recompute([weight](const at::Tensor& u) { return at::tanh(at::linear(u, weight)); }, t);
        return t.sum();
      },
      input);
  EXPECT_LT(live.bytes(), 32768);  // 5 generator states of 5 KB; one inner input has 64 KB
  (void)y;
}

TEST_F(Recompute, DropoutDrawsTheSameNumbersAgainAndLeavesTheGeneratorAlone) {
  const auto draw = [&](const at::Tensor& t) { return at::dropout(layer(at::dropout(t, 0.5, true)), 0.3, true); };
  manual_seed(7);
  const auto expected = gradients(draw(x).sum(), {x, layer.weight});
  const auto next = at::randn({3});

  manual_seed(7);
  const auto y = recompute(draw, x);
  const auto drawn_between = at::randn({3});
  const auto got = gradients(y.sum(), {x, layer.weight});
  expect_equal(got, expected);
  EXPECT_TRUE(at::equal(drawn_between, next));
  manual_seed(7);
  (void)draw(x);
  (void)at::randn({3});
  const auto after = at::randn({3});
  manual_seed(7);
  const auto again = recompute(draw, x);
  (void)at::randn({3});
  (void)gradients(again.sum(), {x});
  EXPECT_TRUE(at::equal(at::randn({3}), after));
}

TEST_F(Recompute, WithoutPreservedGeneratorsDropoutDrawsAnew) {
  const auto wide = at::ones({1000}).requires_grad_();
  const auto draw = [](const at::Tensor& t) { return at::dropout(t * t, 0.5, true); };
  manual_seed(7);
  const auto y = recompute({.preserve_rng_state = false}, draw, wide);
  const auto kept = gradients(y.sum(), {wide}).at(0) != 0;
  EXPECT_FALSE(at::equal(kept, y.detach() != 0));
}

TEST_F(Recompute, DrawsFromTheGeneratorOfARankThatHasItsOwn) {
  // A generator of its own stays with its thread.
  std::thread([] {
    const InterceptScope scope(InterceptScope::Watch::kWrites);
    RankContext::of_this_thread().streams().use_own_generator(11);
    const auto wide = at::ones({1000}).requires_grad_();
    const auto y = recompute([](const at::Tensor& t) { return at::dropout(t * t, 0.5, true); }, wide);
    const auto kept = gradients(y.sum(), {wide}).at(0) != 0;
    EXPECT_TRUE(at::equal(kept, y.detach() != 0));
  }).join();
}

TEST_F(Recompute, DrawsTheSameNumbersFromEveryStream) {
  const testing::DrawFromSlice slices;
  const auto wide = at::ones({1000}).requires_grad_();
  const auto draw = [](const at::Tensor& t) { return at::dropout(t * t, 0.5, true) * at::rand({1000}); };
  manual_seed(7);
  // The stream begins inside of the first call, and has begun before the second one.
  for (int call = 0; call < 2; ++call) {
    const auto y = recompute(draw, wide);
    const auto states = random_states(c10::kCPU);
    EXPECT_TRUE(at::equal(gradients(y.sum(), {wide}).at(0), 2 * y.detach())) << call;
    EXPECT_EQ(random_states(c10::kCPU), states) << call;
  }
}

TEST_F(Recompute, ComputesUnderTheAutocastOfForward) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto run = [&](const at::Tensor& t) { return at::linear(at::tanh(at::mm(t, layer.weight)), layer.weight); };
  const auto plain = run(x).to(at::kFloat).sum();
  const auto y = recompute(run, x).to(at::kFloat).sum();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  const auto expected = gradients(plain, {x, layer.weight});
  expect_equal(gradients(y, {x, layer.weight}), expected);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST_F(Recompute, LeavesNoCastOfAWeightForTheNextForward) {  // which runs after the weight's update
  const auto under_autocast = [&](const auto& function) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor result = function();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return result;
  };
  const auto run = [&](const at::Tensor& t) {
    return at::tanh(at::mm(at::tanh(at::mm(t, layer.weight)), layer.weight));
  };
  const auto y = under_autocast([&] { return recompute(run, x).to(at::kFloat).sum(); });
  at::autocast::clear_cache();  // as the end of autocast's scope does
  gradients(y, {x, layer.weight});
  {
    const at::NoGradGuard no_grad;
    layer.weight.mul_(2);
  }
  const at::Tensor next = under_autocast([&] { return run(x); });
  at::autocast::clear_cache();
  EXPECT_TRUE(at::equal(next, under_autocast([&] { return run(x); })));
  at::autocast::clear_cache();
}

TEST_F(Recompute, ResultsMayBeMapsAndTuples) {
  const auto split = [&](const at::Tensor& t) {
    const auto y = layer(t);
    return std::make_tuple(std::map<std::string, at::Tensor>{{"exp", at::exp(y)}}, at::sigmoid(y), 3);
  };
  const auto plain = split(x);
  const auto expected = gradients((std::get<0>(plain).at("exp") * std::get<1>(plain)).sum(), {x, layer.weight});
  const auto got = recompute(split, x);
  EXPECT_EQ(std::get<2>(got), 3);
  expect_equal(gradients((std::get<0>(got).at("exp") * std::get<1>(got)).sum(), {x, layer.weight}), expected);
}

TEST_F(Recompute, TakesSeveralInputsAndUndefinedOnes) {
  const auto scale = at::randn({6}).requires_grad_();
  const auto run = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& none) {
    return at::tanh(a * b) * (none.defined() ? none : a);
  };
  const auto expected = gradients(run(x, scale, {}).sum(), {x, scale});
  expect_equal(gradients(recompute(run, x, scale, at::Tensor()).sum(), {x, scale}), expected);
  const auto list = [&](const std::vector<at::Tensor>& all) { return run(all[0], all[1], all[2]); };
  expect_equal(gradients(recompute(list, std::vector{x, scale, at::Tensor()}).sum(), {x, scale}), expected);
}

TEST_F(Recompute, WhatTheFunctionCapturesGetsItsGradientToo) {
  const auto hidden = at::tanh(x);  // no leaf
  const auto expected = gradients((hidden * hidden.sigmoid()).sum(), {x}, true);
  const auto y = recompute([hidden](const at::Tensor& t) { return t * hidden.sigmoid(); }, hidden);
  expect_equal(gradients(y.sum(), {x}), expected);
}

TEST_F(Recompute, StopsAfterTheLastTensorThatBackwardNeeds) {
  int ends = 0;
  const auto run = [&](const at::Tensor& t) {
    const auto y = layer(t);
    ++ends;
    return y;
  };
  (void)gradients(recompute(run, x).sum(), {x});
  EXPECT_EQ(ends, 1);
  (void)gradients(recompute({.early_stop = false}, run, x).sum(), {x});
  EXPECT_EQ(ends, 3);
}

TEST_F(Recompute, WithoutGradModeItIsJustACall) {
  const at::NoGradGuard no_grad;
  (void)recompute(call_of(layer), x);
  EXPECT_EQ(layer.calls, 1);
}

TEST_F(Recompute, TheFunctionMayRunABackwardOfItsOwn) {
  const auto run = [&](const at::Tensor& t) {
    const auto inner = t.detach().requires_grad_();
    const auto slope = torch::autograd::grad({layer(inner).square().sum()}, {inner})[0];
    return layer(t) * slope;
  };
  const auto expected = gradients(run(x).sum(), {x, layer.weight});
  expect_equal(gradients(recompute(run, x).sum(), {x, layer.weight}), expected);
}

TEST_F(Recompute, RefusesOtherShapesWhenRecomputed) {
  int call = 0;
  const auto y = recompute(
      {.name = "block 3"}, [&](const at::Tensor& t) { return at::tanh(t.narrow(0, 0, ++call == 1 ? 4 : 2)); }, x);
  EXPECT_EQ(message_of<RecomputeError>([&] { y.sum().backward(); }),
            "block 3: saved tensor 1 of 1 was Float [4, 6] on cpu in forward, and is Float [2, 6] on cpu when "
            "recomputed; the function must compute the same both times");
}

TEST_F(Recompute, RefusesFewerTensorsWhenRecomputed) {
  int call = 0;
  const auto y =
      recompute([&](const at::Tensor& t) { return ++call == 1 ? at::tanh(at::sigmoid(t)) : at::tanh(t); }, x);
  EXPECT_EQ(message_of<RecomputeError>([&] { y.sum().backward(); }),
            "recompute: forward saved 2 tensors for backward, but recomputation only 1; the function must compute the "
            "same both times");
}

TEST_F(Recompute, RefusesMoreTensorsWhenNothingStopsItEarly) {
  int call = 0;
  const auto run = [&](const at::Tensor& t) { return ++call == 1 ? at::tanh(t) : at::tanh(at::sigmoid(t)); };
  const auto y = recompute({.early_stop = false}, run, x);
  EXPECT_EQ(message_of<RecomputeError>([&] { y.sum().backward(); }),
            "recompute: recomputation saved more tensors for backward than the 1 of forward; the function must compute "
            "the same both times");
}

TEST_F(Recompute, ChecksNothingWhenToldSo) {
  int call = 0;
  const auto run = [&](const at::Tensor& t) { return at::tanh(++call == 1 ? t : t.to(at::kDouble)).to(at::kFloat); };
  EXPECT_NO_THROW(gradients(recompute({.determinism_check = false}, run, x).sum(), {x}));
}

TEST_F(Recompute, RefusesAnInputThatWasWrittenSince) {
  const auto input = at::randn({4, 6});
  const auto y = recompute(call_of(layer), input);
  input.add_(1);
  const auto message = message_of<std::exception>([&] { y.sum().backward(); });
  EXPECT_NE(message.find("modified by an inplace operation"), std::string::npos) << message;
}

TEST_F(Recompute, RefusesAnInnerInputThatTheOuterFunctionWrites) {
  const auto y = recompute(
      [&](const at::Tensor& t) {
        const auto a = t * 2;
        const auto b = recompute(call_of(layer), a);
        a.add_(1);
        return at::tanh(b) * a;
      },
      x);
  EXPECT_EQ(message_of<RecomputeError>([&] { y.sum().backward(); }),
            "recompute: saved tensor 1 of 4 was written by the function after autograd had saved it; write into a "
            "clone() of it");
}

TEST_F(Recompute, RefusesAParameterThatWasWrittenSince) {
  const auto y = recompute(call_of(layer), x);
  {
    const at::NoGradGuard no_grad;
    layer.weight.add_(1);
  }
  const auto message = message_of<RecomputeError>([&] { y.sum().backward(); });
  EXPECT_NE(message.find("a parameter [6, 6], was written between forward and backward"), std::string::npos) << message;
}

TEST_F(Recompute, AnErrorOfTheFunctionComesThrough) {
  int call = 0;
  const auto y = recompute(
      [&](const at::Tensor& t) {
        if (++call == 2) throw StateError("second call");
        return at::tanh(t);
      },
      x);
  EXPECT_EQ(message_of<StateError>([&] { y.sum().backward(); }), "second call");
  // And the next region is not disturbed.
  expect_equal(gradients(recompute(call_of(layer), x).sum(), {x}), gradients(layer(x).sum(), {x}));
}

TEST_F(Recompute, ADroppedGraphFreesTheFunction) {
  auto token = std::make_shared<int>(0);
  {
    const auto y = recompute([token](const at::Tensor& t) { return at::exp(t); }, x);
    EXPECT_EQ(token.use_count(), 2);
  }
  EXPECT_EQ(token.use_count(), 1);
  recompute([token](const at::Tensor& t) { return at::exp(t); }, x).sum().backward();
  EXPECT_EQ(token.use_count(), 1);
}

TEST_F(Recompute, SequentialRecomputesAllSegmentsButTheLast) {
  std::vector<Layer*> all = {&layer, &second, &layer, &second, &layer};
  std::vector<std::function<at::Tensor(const at::Tensor&)>> layers;
  for (Layer* one : all) layers.emplace_back(call_of(*one));
  const auto expected = gradients(layer(second(layer(second(layer(x))))).sum(), {x, layer.weight, second.weight});
  layer.calls = second.calls = 0;
  const auto y = recompute_sequential(layers, 2, x);
  EXPECT_EQ(layer.calls + second.calls, 5);
  expect_equal(gradients(y.sum(), {x, layer.weight, second.weight}), expected);
  EXPECT_EQ(layer.calls + second.calls, 7);  // the first two, once more
}

TEST_F(Recompute, SequentialTakesLibtorchsContainer) {
  torch::nn::Sequential net(torch::nn::Linear(6, 6), torch::nn::Tanh(), torch::nn::Linear(6, 6), torch::nn::Tanh());
  const auto expected = gradients(net->forward(x).sum(), net->parameters());
  expect_equal(gradients(recompute_sequential(*net, 4, x).sum(), net->parameters()), expected);
}

TEST_F(Recompute, SequentialRefusesMoreSegmentsThanLayers) {
  std::vector<std::function<at::Tensor(const at::Tensor&)>> layers(3, call_of(layer));
  for (const int segments : {0, 4})
    EXPECT_EQ(message_of<ShapeError>([&] { (void)recompute_sequential(layers, segments, x); }),
              str("recompute_sequential: ", segments, " segments of 3 layers; use 1 to 3"));
}

}  // namespace
}  // namespace trireme
