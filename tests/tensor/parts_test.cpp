// Programs that read sizes of tensors which are cut, and compute with them, in C++: they are the whole's.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "tests/tensor/sliced_programs.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/base/error.h"
#include "trireme/recompute/recompute.h"
#include "trireme/tensor/tensor_parallel.h"

namespace trireme {
namespace {

using namespace sliced;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kWide = 2 * kHidden;

Program of_two_layers(std::function<at::Tensor(const at::Tensor& wide, const Weights& w)> between) {
  return {.shapes = {{"in", {kHidden}},
                     {"up", {kWide, kHidden}},
                     {"bias", {kWide}},
                     {"down", {kHidden, kWide}},
                     {"norm", {kHidden}}},
          .cuts = {{"up", {0, 1, kHeadSize}}, {"bias", {0, 1, kHeadSize}}, {"down", {1, 1, kHeadSize}}},
          .loss = [between = std::move(between)](const Weights& w) {
            const at::Tensor x = at::layer_norm(input(), {kHidden}, w.at("in"));
            const at::Tensor wide = at::linear(x, w.at("up"), w.at("bias"));
            EXPECT_EQ(wide.sizes(), at::IntArrayRef({kBatch, kLength, kWide}));
            const at::Tensor y = at::linear(between(wide, w), w.at("down"));
            // Sharded tokens are read here.
            EXPECT_EQ(y.size(1), kLength);
            const at::Tensor z = y.view({y.size(0) * y.size(1), y.size(2)}) * w.at("norm");
            return squares(z) / static_cast<double>(z.numel()) + y.sin().sum() / static_cast<double>(y.size(1));
          }};
}

void expect_same_of_parts(const Program& program) {
  for (const int ranks : {2, 3, 6}) {
    SCOPED_TRACE("ranks " + std::to_string(ranks));
    expect_same_by(program, ranks, {&TensorParallel::give_parts});
    if (ranks > kLength) continue;
    expect_same_by(program, ranks, {&TensorParallel::give_parts, &TensorParallel::shard_tokens});
  }
}

TEST(Parts, OfWhichAProgramReadsSizes) {
  expect_same_of_parts(of_two_layers([](const at::Tensor& y, const Weights&) {
    const int64_t heads = y.size(-1) / kHeadSize;
    const at::Tensor apart = y.view({y.size(0), y.size(1), heads, y.size(2) / heads});
    const at::Tensor numbers = at::arange(apart.size(2), at::kFloat).view({apart.size(2), 1});
    return (apart * (numbers * 0.1).expand({apart.size(2), apart.size(3)})).reshape(y.sizes());
  }));
  expect_same_of_parts(of_two_layers([](const at::Tensor& y, const Weights& w) {
    const at::Tensor bias = (w.at("bias") * 2).expand({y.size(0), y.size(1), y.size(2)});
    const at::Tensor flat = (y + bias).reshape({-1, y.sizes()[2]});
    return flat.unflatten(0, {y.size(0), y.size(1)}) + at::full(y.sizes(), 0.5) + y.new_zeros(y.sizes()) +
           at::ones(y.size(-1)).cumsum(0);
  }));
}

TEST(Parts, InSlicesAndLoops) {
  expect_same_of_parts(of_two_layers([](const at::Tensor& y, const Weights&) {
    const int64_t half = y.size(-1) / 2;
    const at::Tensor gated = y.slice(-1, 0, half) * y.slice(-1, half, y.size(-1)).sigmoid();
    at::Tensor total = at::cat({gated, y.narrow(-1, half, half)}, -1);
    for (int64_t i = 0; i < y.size(1); ++i) total = total + y.select(1, i).unsqueeze(1) * (i + 1);
    for (const at::Tensor& one : y.split(y.size(-1) / 3, -1)) total = total * (one.mean() + 1);
    for (const at::Tensor& one : y.unbind(0)) total = total + one * static_cast<double>(one.size(1)) / 100;
    return total;
  }));
}

TEST(Parts, WrittenInPlace) {
  expect_same_of_parts(of_two_layers([](const at::Tensor& y, const Weights& w) {
    at::Tensor z = y * 2;
    z += y;
    z.mul_(at::arange(z.size(-1), at::kFloat) * 0.1);
    z.slice(1, 0, z.size(1) / 2).mul_(3);
    z.select(0, 1).add_(w.at("bias"));
    z.view({-1, z.size(-1)}).slice(0, 0, 2).zero_();
    z.masked_fill_(z > 3, 3.0);
    at::Tensor filled = at::zeros(z.sizes());
    filled.copy_(z);
    at::Tensor copied = at::zeros_like(z);
    copied.copy_(filled.sin());
    return copied + z;
  }));
}

/// Multiplies by its width, which backward reads of what it has saved.
struct ByWidth : torch::autograd::Function<ByWidth> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& scale) {
    context->save_for_backward({x, scale});
    return x * x * scale * static_cast<double>(x.size(-1));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list kept = context->get_saved_variables();
    const at::Tensor &x = kept[0], &scale = kept[1];
    EXPECT_EQ(gradients[0].sizes(), x.sizes());
    const at::Tensor by_x = gradients[0] * static_cast<double>(x.size(-1)) * x;
    return {by_x * scale * 2, (by_x * x).sum_to_size(scale.sizes())};
  }
};

TEST(Parts, InFunctionsOfTheProgram) {
  expect_same_of_parts(of_two_layers([](const at::Tensor& y, const Weights& w) {
    const at::Tensor twice = ByWidth::apply(y, w.at("bias") * 1);
    return ByWidth::apply(twice.tanh(), w.at("bias").sigmoid()) + ByWidth::apply(y * 0.1, at::ones({y.size(-1)}));
  }));
}

TEST(Parts, OfBlocksThatAreRecomputed) {
  const auto block = [](const at::Tensor& y, const at::Tensor& bias, const at::Tensor& norms) {
    at::Tensor scale;
    {
      const at::NoGradGuard no_grad;
      scale = y.sum(-1, true) / static_cast<double>(y.size(-1)) + norms.norm();
    }
    const at::Tensor apart = y.view({y.size(0), y.size(1), -1, kHeadSize}).tanh() / static_cast<double>(y.size(2));
    return ByWidth::apply(apart.flatten(2), bias) * scale;
  };
  expect_same_of_parts(of_two_layers([block](const at::Tensor& y, const Weights& w) {
    const at::Tensor bias = w.at("bias") * 2;
    const auto once = [&](const at::Tensor& x) {
      return recompute([&, bias](const at::Tensor& z) { return block(z, bias, w.at("up")); }, x);
    };
    return once(once(y)) * y;
  }));
  Program whole = of_two_layers(
      [block](const at::Tensor& y, const Weights& w) { return block(y, w.at("bias") * 2, w.at("down")); });
  const auto plain = whole.loss;
  whole.loss = [plain](const Weights& w) {
    const auto body = [&](const at::Tensor& in) {
      Weights inner = w;
      inner["in"] = in;
      return plain(inner);
    };
    return recompute({.name = "all"}, body, w.at("in"));
  };
  expect_same_of_parts(whole);
}

TEST(Parts, InAutocast) {
  Program program = of_two_layers([](const at::Tensor& y, const Weights&) {
    return at::gelu(y) * at::softmax(y, 1) * static_cast<double>(y.size(-1)) / 10;
  });
  const auto plain = program.loss;
  program.loss = [plain](const Weights& w) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const at::Tensor loss = plain(w);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    return loss.to(at::kFloat);
  };
  program.tolerance = 3e-2;
  expect_same_of_parts(program);
}

template <class Body>
std::string said_by(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Parts, AreWhatOperatorsGive) {
  constexpr int kRanks = 2;
  run_ranks(kRanks, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    parallel.give_parts();
    const at::Tensor whole = at::randn({kWide, kHidden}, at::detail::createCPUGenerator(3));
    const auto parts = parts_of({kWide, kHidden}, {0}, kRanks);
    const at::Tensor weight = part_of(whole, parts[static_cast<size_t>(rank.id())]).contiguous().requires_grad_();
    parallel.add(weight, parts, false, "up");
    EXPECT_EQ(parallel.whole_sizes(weight), std::vector<int64_t>({kWide, kHidden}));
    const at::Tensor turned = weight.t();
    EXPECT_NE(PartTensor::of(turned), nullptr);
    EXPECT_EQ(turned.sizes(), at::IntArrayRef({kHidden, kWide}));
    const at::Tensor x = input();
    const at::Tensor y = at::matmul(x, turned);
    EXPECT_NE(PartTensor::of(y), nullptr);
    EXPECT_TRUE(parallel.is_part(y));
    EXPECT_FALSE(parallel.whole_sizes(y).has_value());
    at::Tensor expected;
    {
      const WithoutInterception plain;
      expected = at::matmul(x, whole.t());
    }
    EXPECT_TRUE(at::allclose(parallel.gather(y), expected, 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(parallel.sent(y).tensor, expected, 1e-5, 1e-5));
    EXPECT_TRUE(y.contiguous().is_same(y));
    EXPECT_TRUE(y.to(y.scalar_type()).is_same(y));
    // Softmax over what is cut is of wholes; over other dims of parts.
    EXPECT_EQ(PartTensor::of(at::softmax(y, -1)), nullptr);
    EXPECT_NE(PartTensor::of(at::softmax(y, 0)), nullptr);
    EXPECT_NE(said_by([&] { parallel.check_loss(y); }).find("backward: the loss is a slice"), std::string::npos);
    EXPECT_NE(said_by([&] {
                (void)y.as_strided({3, 2}, {8, 2});
              }).find("aten::as_strided is not known"),
              std::string::npos);
    EXPECT_NE(said_by([&] { (void)(y * at::ones({3})); }).find("aten::mul joins [3]"), std::string::npos);
    const at::Tensor written = y.detach().clone(), column = written.select(2, 0);
    column.fill_(0);  // each rank has a copy of it, which goes back
    at::Tensor expected_written = expected.clone();
    expected_written.select(2, 0).fill_(0);
    EXPECT_TRUE(at::allclose(parallel.gather(written), expected_written, 1e-5, 1e-5));
    EXPECT_NE(said_by([&] { (void)y.data_ptr(); }), "");
    y.retain_grad();
    squares(y).backward();
    EXPECT_NE(PartTensor::of(y.grad()), nullptr);
    EXPECT_TRUE(at::allclose(parallel.gather(y.grad()), expected * 2, 1e-5, 1e-5));
    EXPECT_TRUE(at::allclose(parallel.gather_like(y.grad(), y), expected * 2, 1e-5, 1e-5));
    EXPECT_EQ(parallel.gather_like(weight.grad(), weight).sizes(), whole.sizes());
  });
}

/// A layer that the program has written itself, with its weight.
struct OwnLayer : torch::autograd::Function<OwnLayer> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return at::linear(x, weight);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list kept = context->get_saved_variables();
    const at::Tensor &x = kept[0], &weight = kept[1];
    return {gradients[0].matmul(weight.t().t()), gradients[0].flatten(0, 1).t().matmul(x.flatten(0, 1))};
  }
};

/// Has a gradient that depends on no part: it is whole.
struct Penalty : torch::autograd::Function<Penalty> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, const at::Tensor& factors) {
    context->save_for_backward({factors});
    return (weight * factors).sum();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {context->get_saved_variables()[0] * gradients[0], at::Tensor()};
  }
};

/// Gives its argument and what is computed from it; only one of them is used.
struct Rounded : torch::autograd::Function<Rounded> {
  static variable_list forward(AutogradContext* context, const at::Tensor& weight) {
    context->save_for_backward({weight});
    return {(weight * 64).round() / 64, weight.exp()};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {gradients[0] + gradients[1] * context->get_saved_variables()[0]};
  }
};

/// `wide` rows of a weight: on as many ranks each has one.
Program of_own_functions(int64_t wide) {
  return {.shapes = {{"up", {wide, kHidden}}, {"down", {kHidden, wide}}, {"bias", {wide}}, {"norm", {kHidden}}},
          .cuts = {{"up", {0}}, {"down", {1}}, {"bias", {0}}},
          .loss = [wide](const Weights& w) {
            const at::Tensor x = input() * w.at("norm");
            const at::Tensor y = OwnLayer::apply(x, w.at("up"));
            EXPECT_EQ(y.size(-1), wide);
            const auto again = [&](const at::Tensor& z) { return OwnLayer::apply(z.tanh(), w.at("down")); };
            const at::Tensor own = again(y) + recompute(again, y * 2);
            const at::Tensor bias = Rounded::apply(w.at("bias"))[0] + Rounded::apply(w.at("bias").data())[1];
            const at::Tensor plain = at::linear(at::linear(x, Rounded::apply(w.at("up"))[0], bias), w.at("down"));
            // An operator's gradient, in a hook, where nothing but the parameter is a part.
            y.register_hook([&w](const at::Tensor& g) { return g * (w.at("up").norm() + 1); });
            const at::Tensor factors = at::arange(wide * kHidden, at::kFloat).view({wide, kHidden}) / 100;
            return squares(own + plain) + Penalty::apply(w.at("up"), factors) +
                   Penalty::apply(w.at("down"), factors.t()) + w.at("up").sin().sum();
          }};
}

TEST(Parts, OfParametersThatFunctionsTake) {
  expect_same_of_parts(of_own_functions(kWide));
  // A slice of one row: a whole's gradient would be added up to its sizes.
  for (const int ranks : {2, 3}) expect_same_by(of_own_functions(ranks), ranks, {&TensorParallel::give_parts});
}

/// Gives a gradient of the sizes that its parameter says.
struct OfOwnSizes : torch::autograd::Function<OfOwnSizes> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight) {
    context->save_for_backward({weight});
    return weight.sum();
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    return {at::ones(context->get_saved_variables()[0].sizes())};
  }
};

TEST(Parts, OfParametersAreNeitherLocalGradientsNorShared) {
  run_ranks(2, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    parallel.give_parts();
    const auto added = [&](int64_t rows, int64_t shared_by) {
      const auto parts = parts_of({rows, kHidden}, {.dim = 0, .shared_by = shared_by}, 2);
      const at::Tensor weight = at::ones(local_shape(parts[static_cast<size_t>(rank.id())])).requires_grad_();
      parallel.add(weight, parts, false, "own");
      return weight;
    };
    for (const int64_t rows : {kWide, int64_t{2}})
      EXPECT_NE(said_by([&] { OfOwnSizes::apply(added(rows, 1)).backward(); }).find("invalid gradient"),
                std::string::npos);
    std::vector<TensorPart> parts(2, {.shape = {6, kHidden}, .dim = 0, .intervals = {{0, 4}}});
    parts[1].intervals = {{2, 6}};
    const at::Tensor shared = at::ones({4, kHidden}).requires_grad_();
    parallel.add(shared, parts, false, "shared");
    EXPECT_NE(said_by([&] { OwnLayer::apply(input(), shared).sum().backward(); }).find("takes \"shared\" itself"),
              std::string::npos);
    EXPECT_NE(said_by([&] { parallel.give_parts(); }).find("call it before add()"), std::string::npos);
  });
}

/// Hooks, roots and grad() of a parameter speak of its slice.
TEST(Parts, OfParametersThatAProgramAsksForGradients) {
  run_ranks(2, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    parallel.give_parts();
    const auto parts = parts_of({2, kHidden}, {0}, 2);
    const at::Tensor weight = at::ones({1, kHidden}).requires_grad_();
    parallel.add(weight, parts, false, "own");
    int calls = 0;
    weight.register_hook([&](const at::Tensor& gradient) {
      ++calls;
      EXPECT_EQ(gradient.sizes(), weight.sizes());
      return gradient * 3;
    });
    EXPECT_TRUE(weight.is_leaf());
    const at::Tensor once = squares(OwnLayer::apply(input(), weight)) + squares(at::linear(input(), weight));
    once.backward();
    EXPECT_EQ(calls, 1);
    const at::Tensor accumulated = weight.grad().clone();
    weight.mutable_grad() = at::Tensor();
    const at::Tensor again = squares(OwnLayer::apply(input(), weight)) + squares(at::linear(input(), weight));
    const at::Tensor asked = torch::autograd::grad({again}, {weight})[0];
    EXPECT_EQ(PartTensor::of(asked), nullptr);
    EXPECT_TRUE(at::allclose(asked, accumulated));
    torch::autograd::backward({weight}, {at::full({1, kHidden}, 2.0)});
    EXPECT_TRUE(at::allclose(weight.grad(), at::full({1, kHidden}, 6.0)));
    weight.requires_grad_(false);
    EXPECT_EQ(weight.grad_fn(), nullptr);
  });
}

/// As TorchScript reads sizes.
TEST(Parts, TellOperatorsThatLookTheWholesSizes) {
  run_ranks(2, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    parallel.give_parts();
    const at::Tensor weight = at::ones({kWide / 2, kHidden});
    parallel.add(weight, parts_of({kWide, kHidden}, {0}, 2));
    const at::Tensor y = at::linear(input(), weight);
    const auto told = [&](const char* name) {
      torch::jit::Stack stack = {y, int64_t{2}};
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "int").callBoxed(&stack);
      return stack.back().toInt();
    };
    EXPECT_EQ(told("aten::size"), kWide);
    EXPECT_EQ(told("aten::sym_size"), kWide);
    EXPECT_EQ(told("aten::stride"), 1);
  });
}

}  // namespace
}  // namespace trireme
