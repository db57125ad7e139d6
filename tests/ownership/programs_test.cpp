// Programs over stages have the bits of one process: losses, every gradient, buffers.
#include <gtest/gtest.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>

#include "tests/ownership/stages.h"

namespace trireme::testing {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;
using Tensors = std::vector<Tensor>;

/// The numbers of micro-batch `m`, alike in every process.
Tensor numbers(int m, at::IntArrayRef sizes, uint64_t salt = 0) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1000 + 10 * m + salt);
  return at::randn(sizes, generator);
}
Tensor classes(int m, at::IntArrayRef sizes, int64_t count) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(2000 + m);
  return at::randint(0, count, sizes, generator, at::kLong);
}

/// Two stages, by the first letters of names that stage 1 has.
std::function<int(const std::string&)> second_has(std::vector<std::string> beginnings) {
  return [beginnings](const std::string& name) {
    for (const std::string& beginning : beginnings)
      if (name.starts_with(beginning)) return 1;
    return 0;
  };
}

template <class Net>
std::shared_ptr<Net> seeded() {
  static std::mutex mutex;  // the default generator is the process's
  const std::lock_guard lock(mutex);
  torch::manual_seed(0);
  return std::make_shared<Net>();
}

struct Mlp : nn::Module {
  nn::Linear a{register_module("a", nn::Linear(8, 16))}, b{register_module("b", nn::Linear(16, 4))};
};
OwnedProgram mlp() {
  auto net = seeded<Mlp>();
  return {net, second_has({"b"}),
          [net](const Tensors& in, const OwnedProgram::Backward& backward) {
            const Tensor loss = F::mse_loss(net->b(torch::relu(net->a(in[0]))), in[1]);
            backward(loss);
            return Tensors{loss};
          },
          [](int m) {
            return Tensors{numbers(m, {4, 8}), numbers(m, {4, 4}, 1)};
          }};
}

/// Batch norm and dropout on both stages (program 1 of the design).
struct Cnn : nn::Module {
  nn::Conv2d c1{register_module("c1", nn::Conv2d(1, 4, 3))}, c2{register_module("c2", nn::Conv2d(4, 6, 3))};
  nn::BatchNorm2d b1{register_module("b1", nn::BatchNorm2d(4))};
  nn::BatchNorm2d b2{register_module("b2", nn::BatchNorm2d(nn::BatchNormOptions(6).affine(false)))};
  nn::Linear f1{register_module("f1", nn::Linear(6 * 4 * 4, 16))}, f2{register_module("f2", nn::Linear(16, 5))};
};
OwnedProgram cnn() {
  auto net = seeded<Cnn>();
  return {net, second_has({"b2", "f"}),
          [net](const Tensors& in, const OwnedProgram::Backward& backward) {
            Tensor x = torch::relu(net->b1(net->c1(in[0])));
            x = net->b2(torch::relu(net->c2(x)));
            x = torch::dropout(torch::max_pool2d(x, 2), 0.25, true);
            x = torch::dropout(torch::relu(net->f1(torch::flatten(x, 1))), 0.5, true);
            const Tensor out = torch::log_softmax(net->f2(x), 1);
            const Tensor loss = torch::nll_loss(out, in[1]);
            backward(loss);
            return Tensors{out, loss};
          },
          [](int m) {
            return Tensors{numbers(m, {3, 1, 12, 12}), classes(m, {3}, 5)};
          }};
}

/// An embedding that is the head, too (3): the program returns to its stage.
struct Tied : nn::Module {
  nn::Embedding word{register_module("word", nn::Embedding(11, 8))};
  nn::Linear a{register_module("a", nn::Linear(8, 8))}, b{register_module("b", nn::Linear(8, 8))};
};
OwnedProgram tied() {
  auto net = seeded<Tied>();
  return {net, second_has({"b"}),
          [net](const Tensors& in, const OwnedProgram::Backward& backward) {
            const Tensor x = torch::dropout(net->b(torch::tanh(net->a(net->word(in[0])))), 0.1, true);
            const Tensor logits = torch::matmul(x, net->word->weight.t());
            const Tensor loss = F::cross_entropy(logits.flatten(0, 1), in[0].flatten());
            backward(loss);
            return Tensors{loss};
          },
          [](int m) {
            return Tensors{classes(m, {2, 5}, 11)};
          }};
}

/// Three stages, there and back, with skips of three uses (7).
struct Three : nn::Module {
  nn::Linear a{register_module("a", nn::Linear(8, 8))}, b{register_module("b", nn::Linear(8, 8))};
  nn::Linear c{register_module("c", nn::Linear(8, 8))}, d{register_module("d", nn::Linear(8, 8))};
  nn::Linear e{register_module("e", nn::Linear(8, 5))};
};
OwnedProgram three() {
  auto net = seeded<Three>();
  return {net, [](const std::string& name) { return name[0] == 'a' || name[0] == 'e' ? 0
                                                    : name[0] == 'c'                 ? 2
                                                                                     : 1; },
          [net](const Tensors& in, const OwnedProgram::Backward& backward) {
            const Tensor a = torch::tanh(net->a(in[0])), b = torch::tanh(net->b(a)), c = torch::tanh(net->c(b) + a);
            const Tensor d = torch::tanh(net->d(c)) + b;
            const Tensor loss = F::cross_entropy(net->e(d + a + a * c), in[1]);
            backward(loss);
            return Tensors{loss};
          },
          [](int m) {
            return Tensors{numbers(m, {6, 8}), classes(m, {6}, 5)};
          }};
}

/// Values that decide, masks as indices, a module used twice, writes in place and into a buffer of nobody (8).
struct Odd : nn::Module {
  nn::Embedding e{register_module("e", nn::Embedding(20, 8))};
  nn::Linear a{register_module("a", nn::Linear(8, 8))}, b{register_module("b", nn::Linear(8, 8))};
  nn::Linear back{register_module("c", nn::Linear(8, 8))}, h{register_module("h", nn::Linear(8, 20))};
  nn::LayerNorm n{register_module("n", nn::LayerNorm(nn::LayerNormOptions({8})))};
};
OwnedProgram odd() {
  auto net = seeded<Odd>();
  return {net, second_has({"b", "h", "n"}),
          [net](const Tensors& in, const OwnedProgram::Backward& backward) {
            const Tensor positions = torch::arange(in[0].size(1));
            Tensor x = net->e(in[0]) + net->e(positions);
            const Tensor first = x, skip = net->a(x);
            x = x + net->n(torch::gelu(net->b(x)));
            if (x.abs().mean().item<double>() > 0.1) x = x * 1.5;
            const Tensor mask = torch::full({x.size(1), x.size(1)}, -1.).triu(1);
            x = x + torch::matmul(mask, x) * 0.01 + skip + first;
            x = torch::tanh(net->back(x)) + skip * first;
            x = net->n(net->b(x));
            x = x * 1;
            x.mul_(0.5);
            const Tensor buffer = torch::zeros({x.size(0), x.size(1) + 1, x.size(2)});
            buffer.slice(1, 1).copy_(x);
            x = buffer.slice(1, 1) + 0;
            const Tensor logits = net->h(x), chosen = in[1] > 6;
            const Tensor loss = F::cross_entropy(logits.index({chosen}), in[1].index({chosen}));
            backward(loss);
            return Tensors{loss};
          },
          [](int m) {
            return Tensors{classes(m, {3, 6}, 20), classes(m + 50, {3, 6}, 20)};
          }};
}

/// Views of a tensor that are made when the other stage has used it.
struct Two : nn::Module {
  nn::Linear a{register_module("a", nn::Linear(8, 8))}, b{register_module("b", nn::Linear(8, 8))};
};
OwnedProgram with_two(std::function<Tensor(Two&, const Tensor& x)> second) {
  auto net = seeded<Two>();
  return {net, second_has({"b"}),
          [=](const Tensors& in, const OwnedProgram::Backward& backward) {
            const Tensor loss = second(*net, torch::tanh(net->a(in[0]))).square().mean();
            backward(loss);
            return Tensors{loss};
          },
          [](int m) {
            return Tensors{numbers(m, {6, 8})};
          }};
}
OwnedProgram views() {
  return with_two([](Two& net, const Tensor& x) {
    const Tensor y = torch::tanh(net.b(x)) * x;
    const auto halves = (y + x.select(0, 1) * y.select(0, 3)).chunk(2, 1);
    const auto of_x = x.chunk(2, 1);
    return halves[0] * of_x[1] + halves[1] * of_x[0].view({3, 2, 4}).flatten(0, 1);
  });
}
OwnedProgram copies() {
  return with_two([](Two& net, const Tensor& x) {
    const Tensor y = torch::tanh(net.b(x)) * x;
    return net.b(y + x.t().reshape({6, 8}) + x);
  });
}

/// A product has other bits where its memory is aligned otherwise.
OwnedProgram unaligned() {
  return with_two([](Two& net, const Tensor& x) {
    const Tensor buffer = torch::zeros({7 * 8 + 1});
    const Tensor view = buffer.slice(0, 1, 49).view({6, 8});
    Tensor(view).copy_(x);
    return net.b(view);
  });
}

struct Case {
  const char* name;
  OwnedProgram (*make)();
  std::vector<int> visits;

  int stages() const { return *std::ranges::max_element(visits) + 1; }
};
class Programs : public ::testing::TestWithParam<Case> {};

TEST_P(Programs, HaveTheBitsOfOneProcess) {
  const Case& program = GetParam();
  const StepResult one = run_over_stages(program.make, 1, 4, "sequential");
  for (const std::string schedule : {"sequential", "gpipe", "1f1b"}) {
    if (schedule != "sequential" && !std::ranges::is_sorted(program.visits)) continue;
    const StepResult staged = run_over_stages(program.make, program.stages(), 4, schedule);
    EXPECT_EQ(first_difference(staged, one), "") << schedule;
    EXPECT_EQ(staged.visits, program.visits) << schedule;
  }
}

INSTANTIATE_TEST_SUITE_P(Each, Programs,
                         ::testing::Values(Case{"Mlp", mlp, {0, 1}}, Case{"Cnn", cnn, {0, 1}},
                                           Case{"Tied", tied, {0, 1, 0}}, Case{"Three", three, {0, 1, 2, 1, 2, 1, 0}},
                                           Case{"Odd", odd, {0, 1, 0, 1}}, Case{"Views", views, {0, 1}},
                                           Case{"Copies", copies, {0, 1, 0, 1}}, Case{"Unaligned", unaligned, {0, 1}}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace trireme::testing
