// Values and gradients have the strides that they have in one process, wherever they are used: a product or a sum of
// the same numbers in another order of memory has other last bits.
#include <gtest/gtest.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>

#include "tests/ownership/stages.h"

namespace trireme::testing {
namespace layouts {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;
using Tensors = std::vector<Tensor>;

Tensor numbers(int m, at::IntArrayRef sizes) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(300 + m);
  return at::randn(sizes, generator);
}

/// Stage 0 has `a`, stage 1 has `b`.
struct Net : nn::Module {
  Net() {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const auto make = [&](const char* name, at::IntArrayRef sizes) {
      return register_parameter(name, at::randn(sizes, generator) * 0.2);
    };
    a = make("a", {61, 37});
    bias = make("a_bias", {61});
    b = make("b", {53, 61});
    conv_a = make("a_conv", {16, 6, 3, 3});
    conv_bias = make("a_conv_bias", {16});
    conv_b = make("b_conv", {5, 16, 3, 3});
  }
  Tensor a, bias, b, conv_a, conv_bias, conv_b;
};

/// `forward` makes a loss of the network and the micro-batch's numbers.
struct Case {
  const char* name;
  Tensor (*forward)(Net& net, const Tensor& x);
  std::vector<int64_t> sizes = {43, 37};
};

Tensor first(Net& net, const Tensor& x) { return torch::linear(x, net.a, net.bias); }
Tensor image(Net& net, const Tensor& x) { return torch::conv2d(x, net.conv_a, net.conv_bias); }

const Case kCases[] = {
    {"Transposed", [](Net& net, const Tensor& x) { return torch::tanh(torch::mm(net.b, first(net, x).t())).mean(); }},
    {"Expanded",
     [](Net& net, const Tensor& x) {
       return torch::cat({first(net, x), net.b}).mean();
     }},
    {"ExpandedInOneDim",
     [](Net& net, const Tensor& x) {
       const Tensor both = torch::cat({first(net, x), net.b});
       return torch::tanh(both.mean(1)).mean() + torch::tanh(both.mean(0)).mean();
     }},
    {"PartOfALargerOne",
     [](Net& net, const Tensor& x) {
       return torch::tanh(torch::cat({net.b, first(net, x).slice(0, 0, 40).t().t()}).t()).pow(2).mean();
     }},
    {"ColumnsOfALargerOne",
     [](Net& net, const Tensor& x) {
       return torch::tanh(torch::cat({net.b.t(), first(net, x).t()}, 1)).pow(3).mean();
     }},
    {"ChannelsLast",
     [](Net& net, const Tensor& x) {
       return torch::tanh(torch::conv2d(image(net, x.contiguous(at::MemoryFormat::ChannelsLast)), net.conv_b)).mean();
     },
     {3, 6, 14, 14}},
    {"Permuted",
     [](Net& net, const Tensor& x) {
       return torch::tanh(torch::conv2d(image(net, x).permute({0, 1, 3, 2}), net.conv_b)).mean();
     },
     {3, 6, 14, 14}},
    {"Complex",
     [](Net& net, const Tensor& x) {
       const Tensor h = torch::complex(first(net, x), first(net, x) * 2).conj();
       return torch::real(torch::mm(torch::complex(net.b, net.b), h.t())).pow(2).mean();
     }},
};

class Layouts : public ::testing::TestWithParam<Case> {};

TEST_P(Layouts, HaveTheBitsOfOneProcess) {
  const Case& one = GetParam();
  const MakeProgram make = [&]() -> OwnedProgram {
    auto net = std::make_shared<Net>();
    return {net, [](const std::string& name) { return name[0] == 'b' ? 1 : 0; },
            [net, &one](const Tensors& in, const OwnedProgram::Backward& backward) {
              const Tensor loss = one.forward(*net, in[0]);
              backward(loss);
              return Tensors{loss};
            },
            [&one](int m) { return Tensors{numbers(m, one.sizes)}; }};
  };
  EXPECT_EQ(first_difference(run_over_stages(make, 2, 2, "1f1b"), run_over_stages(make, 1, 2, "sequential")), "");
}

INSTANTIATE_TEST_SUITE_P(Each, Layouts, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace layouts
}  // namespace trireme::testing
