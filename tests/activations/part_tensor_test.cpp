#include "trireme/activations/part_tensor.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tests/activations/parts_by_rows.h"

namespace trireme::testing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = std::vector<at::Tensor>;

TEST(APart, TellsAProgramTheWholesSizesAndOperatorsItsOwn) {
  PartsByRows pass(1);
  const at::Tensor part = part_of(drawn({5, 4}), 1);
  EXPECT_EQ(part.sizes(), at::IntArrayRef({3, 4}));
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  EXPECT_EQ(part.sizes(), at::IntArrayRef({5, 4}));
  EXPECT_EQ(part.sym_sizes(), c10::fromIntArrayRefSlow({5, 4}));
  EXPECT_EQ(part.numel(), 20);
  EXPECT_EQ(part.dim(), 2);
  EXPECT_EQ(part.size(-2), 5);
  EXPECT_EQ(part.strides(), at::IntArrayRef({4, 1}));
  EXPECT_EQ(part.t().sizes(), at::IntArrayRef({4, 5}));
  EXPECT_EQ(part.t().strides(), at::IntArrayRef({1, 4}));
  EXPECT_TRUE(part.is_contiguous());
  EXPECT_FALSE(part.t().is_contiguous());
  const WithoutInterception inside;
  EXPECT_EQ(part.sizes(), at::IntArrayRef({3, 4}));
  EXPECT_EQ(part.numel(), 12);
}

TEST(APart, HasTheGradientsOfThePlainProgram) {
  expect_as_plain(
      [](Tensors& x, Tensors& w) {
        const at::Tensor y = at::gelu(at::linear(x[0], w[0], w[1]) + x[0]);
        return (y.view({y.size(0), 2, 2}).transpose(1, 2) * w[2]).sum();
      },
      {{4, 4}, {4}, {2, 2}});
}

/// x * x * w, from what it saved; it multiplies by sizes that it reads.
struct Squares : torch::autograd::Function<Squares> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    return x * x * w * static_cast<double>(x.size(0));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    EXPECT_EQ(gradients[0].sizes(), saved[0].sizes());
    const double rows = static_cast<double>(saved[0].size(0));
    return {gradients[0] * saved[0] * saved[1] * (2 * rows), (gradients[0] * saved[0] * saved[0]).sum(0) * rows};
  }
};

TEST(APart, IsAPartInAFunctionOfTheProgramsToo) {
  const std::vector<std::vector<int64_t>> row = {{4}};
  {
    SCOPED_TRACE("between operators");
    expect_as_plain([](Tensors& x, Tensors& w) { return (Squares::apply(x[0] * 2, w[0]) * 3).sum(); }, row);
  }
  {
    SCOPED_TRACE("of a leaf");
    expect_as_plain([](Tensors& x, Tensors& w) { return Squares::apply(x[0], w[0]).sum(); }, row);
  }
  {
    SCOPED_TRACE("of a leaf, before and after operators");
    expect_as_plain(
        [](Tensors& x, Tensors& w) {
          return (Squares::apply(x[0], w[0]) + x[0] * 2 + Squares::apply(x[0], w[0])).sum();
        },
        row);
  }
  {
    SCOPED_TRACE("a chain");
    expect_as_plain([](Tensors& x, Tensors& w) { return Squares::apply(Squares::apply(x[0] + 1, w[0]), w[0]).sum(); },
                    row);
  }
  {
    SCOPED_TRACE("used twice, by an operator and a function");
    expect_as_plain(
        [](Tensors& x, Tensors& w) {
          const at::Tensor y = Squares::apply(x[0] + 1, w[0]);
          return (Squares::apply(y, w[0]) + y * 2 + Squares::apply(y, w[0])).sum();
        },
        row);
  }
}

}  // namespace
}  // namespace trireme::testing
