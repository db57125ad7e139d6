#include "trireme/activations/part_tensor.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/activations/parts_by_rows.h"
#include "tests/support/operators/quiet.h"
#include "trireme/recompute/recompute.h"

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

TEST(APart, TellsTorchScriptTheWholesSizes) {
  // Sizes are operators there; opened ones count as a program.
  PartsByRows pass(1);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const auto size = c10::Dispatcher::singleton().findSchemaOrThrow("aten::size", "int");
  torch::jit::Stack stack{part_of(drawn({5, 4}), 1), 0};
  size.callBoxed(stack);
  EXPECT_EQ(stack.at(0).toInt(), 5);
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

/// Two results, of which a program may use one: libtorch gives the other one's gradient as zeros of the whole.
struct Twice : torch::autograd::Function<Twice> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return {x * 2, x * x};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    EXPECT_EQ(gradients[0].sizes(), x.sizes());
    EXPECT_EQ(gradients[1].sizes(), x.sizes());
    return {gradients[0] * 2 + gradients[1] * x * 2};
  }
};
/// Gives the gradient of its second result alone, whatever it is.
struct SecondOf : torch::autograd::Function<SecondOf> {
  static variable_list forward(AutogradContext*, const at::Tensor& x) { return {x * 2, x * 3}; }
  static variable_list backward(AutogradContext*, const variable_list& gradients) { return {gradients[1] * 3}; }
};

TEST(APart, HasAWholeGradientOfZerosWhereAFunctionsResultIsNotUsed) {
  expect_as_plain([](Tensors& x, Tensors&) { return Twice::apply(x[0] + 1)[0].sum(); });
  expect_as_plain([](Tensors& x, Tensors&) { return Twice::apply(x[0])[1].sum(); });
  expect_as_plain([](Tensors& x, Tensors&) { return (SecondOf::apply(x[0])[0] + x[0]).sum(); });
}

/// Gradients that are whole where a part is meant, and are not zeros.
struct OnesForIt : torch::autograd::Function<OnesForIt> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->saved_data["rows"] = x.size(0);
    return x * 2;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list&) {
    const int64_t rows = ctx->saved_data["rows"].toInt();
    return {at::arange(rows * 4, at::kDouble).view({rows, 4})};
  }
};
TEST(APart, TakesItsShareOfAWholeGradient) {
  expect_as_plain([](Tensors& x, Tensors&) { return OnesForIt::apply(x[0] * 3).sum(); });
}

/// Saves what it gives.
struct Exponential : torch::autograd::Function<Exponential> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    const at::Tensor y = x.exp();
    ctx->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const at::Tensor y = ctx->get_saved_variables()[0];
    EXPECT_EQ(y.sizes(), gradients[0].sizes());
    return {gradients[0] * y};
  }
};
/// Writes what it gets.
struct Doubles : torch::autograd::Function<Doubles> {
  static at::Tensor forward(AutogradContext* ctx, at::Tensor x) {
    x.mul_(2);
    ctx->mark_dirty({x});
    ctx->saved_data["rows"] = x.size(0);
    return x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    EXPECT_EQ(gradients[0].size(0), ctx->saved_data["rows"].toInt());
    return {gradients[0] * 2};
  }
};
struct Given : torch::autograd::Function<Given> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x; }
  static variable_list backward(AutogradContext*, const variable_list& gradients) { return {gradients[0] * 5}; }
};

TEST(APart, IsSavedAndWrittenByFunctions) {
  {
    SCOPED_TRACE("a saved result");
    expect_as_plain([](Tensors& x, Tensors&) { return (Exponential::apply(x[0]) * 2).sum(); });
  }
  {
    SCOPED_TRACE("a result that is the argument");
    expect_as_plain([](Tensors& x, Tensors&) { return Given::apply(Given::apply(x[0] * 2)).sum(); });
  }
  {
    SCOPED_TRACE("written");
    expect_as_plain(
        [](Tensors& x, Tensors& w) {
          at::Tensor y = x[0] * w[0];
          const at::Tensor z = Doubles::apply(y);
          EXPECT_EQ(z.unsafeGetTensorImpl(), y.unsafeGetTensorImpl());
          return (y * y + z).sum();
        },
        {{4}});
  }
  {
    SCOPED_TRACE("written, with a view that was there before");
    expect_as_plain([](Tensors& x, Tensors&) {
      at::Tensor y = x[0] * 3;
      const at::Tensor view = y.view({y.size(0), 2, 2});
      (void)Doubles::apply(y);
      return (view * view).sum();
    });
  }
  {
    SCOPED_TRACE("a written view");
    expect_as_plain([](Tensors& x, Tensors&) {
      at::Tensor y = x[0] * 3;
      at::Tensor view = y.narrow(1, 1, 2);
      (void)Doubles::apply(view);
      return (y * y).sum() + (view * view * view).sum();
    });
  }
  {
    SCOPED_TRACE("a written view of all columns in another order");
    expect_as_plain([](Tensors& x, Tensors&) {
      at::Tensor y = x[0] * 3;
      at::Tensor view = y.t();
      (void)Doubles::apply(view);
      return (y * y).sum();
    });
  }
  {
    SCOPED_TRACE("a written view, then operators that write it and its base");
    expect_as_plain(
        [](Tensors& x, Tensors& w) {
          at::Tensor y = x[0] * 3;
          at::Tensor view = y.narrow(1, 0, 3);
          (void)Doubles::apply(view);
          view.mul_(w[0].narrow(0, 0, 3));
          y.mul_(w[0]);
          (void)Doubles::apply(view);
          return (y * y).sum() + view.sum();
        },
        {{4}});
  }
}

TEST(APart, IsWrittenByOperators) {
  {
    SCOPED_TRACE("itself");
    expect_as_plain(
        [](Tensors& x, Tensors& w) {
          at::Tensor y = x[0] * 2;
          const at::Tensor same = y.mul_(w[0]);
          EXPECT_EQ(same.unsafeGetTensorImpl(), y.unsafeGetTensorImpl());
          y.add_(x[0]);
          return (y * same).sum();
        },
        {{4}});
  }
  {
    SCOPED_TRACE("a view");
    expect_as_plain(
        [](Tensors& x, Tensors& w) {
          at::Tensor y = x[0] * 2;
          y.narrow(1, 1, 2).mul_(3).add_(w[0]);
          y.t().mul_(2);
          return (y * y).sum();
        },
        {{2}});
  }
  {
    SCOPED_TRACE("a view that was there before, its history made again");
    expect_as_plain([](Tensors& x, Tensors&) {
      at::Tensor y = x[0] * 2;
      const at::Tensor view = y.narrow(1, 1, 2);
      y.mul_(x[0]);
      EXPECT_TRUE(view.grad_fn() != nullptr);
      return (view * view).sum();
    });
  }
  {
    SCOPED_TRACE("numbers that get a history through a view");
    expect_as_plain([](Tensors& x, Tensors&) {
      at::Tensor y = at::zeros_like(x[0]);
      y.narrow(1, 1, 2).add_(x[0].narrow(1, 0, 2));
      EXPECT_TRUE(y.requires_grad());
      return Squares::apply(y + x[0], at::ones({4}, at::kDouble)).sum();
    });
  }
  {
    SCOPED_TRACE("several views at once");
    expect_as_plain([](Tensors& x, Tensors&) {
      const Tensors halves = (x[0] * 2).chunk(2, 1);
      EXPECT_THROW(halves[0].mul_(2), c10::Error);
      const Tensors columns = (x[0] * 3).unbind(1);
      return (halves[0] * halves[1]).sum() + (columns[0] * columns[3]).sum();
    });
  }
}

TEST(APart, IsWhatHooksGet) {
  expect_as_plain([](Tensors& x, Tensors&) {
    const auto hook = [rows = x[0].size(0)](const at::Tensor& gradient) {
      EXPECT_EQ(gradient.size(0), rows);
      return gradient * 2;
    };
    x[0].register_hook(hook);
    const at::Tensor y = x[0] * 3;
    y.register_hook(hook);
    const at::Tensor z = Squares::apply(y, at::ones({4}, at::kDouble));
    z.register_hook(hook);
    const unsigned removed = y.register_hook([](const at::Tensor& gradient) { return gradient * 100; });
    y.remove_hook(removed);
    y.register_hook([](const at::Tensor& gradient) { EXPECT_TRUE(gradient.defined()); });
    return (z * 2).sum() + y.sum();
  });
}

TEST(APart, IsTheGradientThatATensorRetains) {
  at::Tensor whole, part;
  for (const int rank : {-1, 0, 1}) {
    PartsByRows pass(rank);
    std::optional<InterceptScope> scope;
    if (rank >= 0) scope.emplace(InterceptScope::Watch::kWrites, &pass);
    const at::Tensor values = at::arange(20, at::kDouble).view({5, 4});
    const at::Tensor x = (rank < 0 ? values.clone() : part_of(values, rank)).requires_grad_();
    at::Tensor y = x * 2, z = Squares::apply(y, at::ones({4}, at::kDouble)), written = x * 3;
    for (at::Tensor one : {y, z, written}) one.retain_grad();
    y.retain_grad();
    EXPECT_TRUE(y.retains_grad());
    written.mul_(y);
    (void)Doubles::apply(written);
    for (int i = 0; i < 2; ++i) ((z * 2).sum() + y.sum() + written.sum()).backward({}, /*retain_graph=*/true);
    const Tensors gradients{x.grad(), y.grad(), z.grad(), written.grad()};
    if (rank < 0) {
      whole = at::stack(gradients);
      continue;
    }
    for (size_t i = 0; i < gradients.size(); ++i) {
      SCOPED_TRACE(i);
      ASSERT_TRUE(gradients[i].defined());
      EXPECT_EQ(gradients[i].sizes(), values.sizes());
      EXPECT_TRUE(at::equal(local_of(gradients[i]), slice_of(whole[i], *rows_of({5, 4}), rank)));
    }
  }
}

TEST(APart, IsTheGradientThatIsAskedFor) {
  PartsByRows pass(1);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const at::Tensor x = part_of(drawn({5, 4}), 1).requires_grad_(), w = drawn({4}).requires_grad_();
  const at::Tensor y = x * w, z = Squares::apply(y, w), loss = (z * 2).sum();
  const Tensors found = torch::autograd::grad({loss}, {x, y, z, w}, {}, /*retain_graph=*/true);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(found[i].sizes(), at::IntArrayRef({5, 4})) << i;
  EXPECT_EQ(PartTensor::of(found[3]), nullptr);
  EXPECT_TRUE(at::allclose(local_of(found[2]), at::full({3, 4}, 2, at::kDouble)));
  EXPECT_TRUE(at::allclose(local_of(found[1]), local_of(y) * w * 20));
  EXPECT_TRUE(at::allclose(local_of(found[0]), local_of(y) * w * w * 20));
  torch::autograd::backward({loss}, {}, /*retain_graph=*/true, false, {x});
  EXPECT_EQ(x.grad().sizes(), at::IntArrayRef({5, 4}));
  EXPECT_FALSE(w.grad().defined());
  // A part from which backward begins, with a gradient that is a part, or whole.
  torch::autograd::backward({z}, {at::ones_like(z)}, /*retain_graph=*/true);
  EXPECT_TRUE(at::allclose(local_of(x.grad()), local_of(y) * w * w * 30));
  torch::autograd::backward({y}, {at::ones({5, 4}, at::kDouble)});
  EXPECT_TRUE(at::allclose(local_of(x.grad()), local_of(y) * w * w * 30 + w));
}

TEST(APart, DoesNotShareTheMemoryOfAnotherLeafsGradient) {
  expect_as_plain(
      [](Tensors& x, Tensors&) {
        const at::Tensor y = x[0] + x[1];
        for (int i = 0; i < 2; ++i) (y * y).sum().backward({}, /*retain_graph=*/true);
        return (y * y).sum() + (x[0] * 2).sum();
      },
      {}, /*cut_leaves=*/2);
}

/// As torch.utils.checkpoint with use_reentrant=True.
using Block = std::function<at::Tensor(const at::Tensor&)>;
struct KeptBlock final : torch::CustomClassHolder {
  explicit KeptBlock(Block kept) : block(std::move(kept)) {}
  const Block block;
};
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Block& block) {
    ctx->saved_data["block"] = c10::IValue::make_capsule(c10::make_intrusive<KeptBlock>(block));
    ctx->save_for_backward({x});
    return block(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto kept = c10::static_intrusive_pointer_cast<KeptBlock>(ctx->saved_data["block"].toCapsule());
    const at::Tensor saved = ctx->get_saved_variables()[0];
    const at::Tensor x = saved.detach().requires_grad_();
    at::Tensor result;
    {
      const at::AutoGradMode with_graph(true);
      result = kept->block(x);
    }
    EXPECT_EQ(result.sizes(), gradients[0].sizes());
    torch::autograd::backward({result}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};
at::Tensor checkpoint(const Block& block, const at::Tensor& x) { return Checkpoint::apply(x, block); }

/// Its sizes are read under no_grad, and in a function's forward.
at::Tensor sized(const at::Tensor& x, const at::Tensor& w) {
  double rows = 0;
  {
    const at::NoGradGuard no_grad;
    rows = static_cast<double>((x * 2).size(0));
  }
  return Squares::apply(at::gelu(at::linear(x, w)) * rows, w[0]) * static_cast<double>(x.size(0)) /
         (rows * rows * rows);
}

std::atomic<int> on_other_threads = 0;

/// So many checkpoints around one another.
Block nested(int depth, const at::Tensor& w) {
  if (depth == 0)
    return [w, thread = std::this_thread::get_id()](const at::Tensor& y) {
      if (std::this_thread::get_id() != thread) ++on_other_threads;
      return sized(y, w);
    };
  return [inner = nested(depth - 1, w)](const at::Tensor& y) {
    return checkpoint(inner, y * 1.01) * (static_cast<double>(y.size(0)) / 5);
  };
}

TEST(APart, IsAPartInABlockThatIsRecomputed) {
  on_other_threads = 0;
  for (const int depth : {1, 2, 3, 70}) {
    // More than sixty go to autograd's other threads.
    SCOPED_TRACE(str(depth, " around each other"));
    expect_as_plain([depth](Tensors& x, Tensors& w) { return nested(depth, w[0])(x[0] * 2).sum(); });
    expect_as_plain([depth](Tensors& x, Tensors& w) { return nested(depth, w[0])(x[0]).sum(); });
    expect_as_plain([depth](Tensors& x, Tensors& w) {
      return (Squares::apply(nested(depth, w[0])(Squares::apply(x[0], w[0][0])), w[0][1]) * x[0]).sum();
    });
    EXPECT_EQ(on_other_threads > 0, depth > 60);
  }
}

TEST(APart, IsAPartInABlockThatIsRecomputedForItsSavedTensors) {
  {
    SCOPED_TRACE("once");
    expect_as_plain([](Tensors& x, Tensors& w) {
      return recompute([w](const at::Tensor& y) { return sized(y, w[0]) * y; }, x[0] * 2).sum();
    });
  }
  {
    SCOPED_TRACE("a leaf");
    expect_as_plain([](Tensors& x, Tensors& w) {
      return recompute([w](const at::Tensor& y) { return sized(y, w[0]) * y; }, x[0]).sum();
    });
  }
  {
    SCOPED_TRACE("within each other, and a checkpoint of the other kind");
    expect_as_plain([](Tensors& x, Tensors& w) {
      const auto inner = [w](const at::Tensor& y) {
        return recompute([w](const at::Tensor& z) { return sized(z, w[0]); }, y) * y;
      };
      return recompute([w, inner](const at::Tensor& y) { return inner(nested(1, w[0])(y * 2)); }, x[0] * 2).sum();
    });
  }
}

template <class Body>
std::string thrown_by(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Notes whether its gradient is a part.
struct Looks : torch::autograd::Function<Looks> {
  static at::Tensor forward(AutogradContext*, at::Tensor x) { return x * 2; }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    EXPECT_NE(PartTensor::of(gradients[0]), nullptr);
    return {gradients[0] * 2};
  }
};

TEST(APart, IsOneWhereARankHasAllOfTheWholeToo) {
  Placement placement(2);
  const auto all = std::make_shared<const Ranges>(4, std::vector<std::vector<Interval>>{{{0, 4}}, {{0, 2}}});
  for (const int rank : {0, 1}) placement.at(rank).push_back({0, 0, 1, all});
  const auto of = std::make_shared<const PartOf>(PartOf{{4, 4}, placement});
  PartsByRows pass(0);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const at::Tensor values = drawn({4, 4}), x = PartTensor::wrap(values.clone(), of).requires_grad_();
  at::Tensor y = x * 3;
  (void)Doubles::apply(y);
  at::Tensor view = y.t();
  (void)Doubles::apply(view);
  (Looks::apply(Looks::apply(y) * 5) * y).backward(at::ones({4, 4}));
  ASSERT_NE(PartTensor::of(x.grad()), nullptr);
  EXPECT_TRUE(at::allclose(local_of(x.grad()), values * 2 * 20 * 12 * 12));
}

TEST(APart, ThatIsWrittenAfterItWasSavedIsNamed) {
  PartsByRows pass(0);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const at::Tensor x = part_of(drawn({4, 4}), 0).requires_grad_(), w = drawn({4}).requires_grad_();
  at::Tensor y = x * 2;
  const at::Tensor by_function = Squares::apply(y, w).sum(), by_operator = (y * w).sum();
  y.add_(1);
  EXPECT_EQ(y._version(), 1);
  EXPECT_NE(thrown_by([&] { by_function.backward(); }).find("modified by an inplace operation"), std::string::npos);
  EXPECT_NE(thrown_by([&] { by_operator.backward(); }).find("modified by an inplace operation"), std::string::npos);
}

TEST(APart, HasNoHistoryInInferenceMode) {
  PartsByRows pass(1);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const c10::InferenceMode inference;
  const at::Tensor x = part_of(drawn({5, 4}), 1);
  EXPECT_TRUE(x.is_inference());
  EXPECT_EQ((x * 2).size(0), 5);
  EXPECT_EQ(x.view({5, 2, 2}).size(1), 2);
  EXPECT_FALSE((x * 2).requires_grad());
}

/// Gives a gradient that is cut along the other dim.
struct Turned : torch::autograd::Function<Turned> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext*, const variable_list& gradients) { return {gradients[0].t()}; }
};

TEST(APart, TakesAGradientThatIsCutOtherwiseByAnExchangeAlone) {
  PartsByRows pass(0);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const at::Tensor x = part_of(drawn({4, 4}), 0).requires_grad_();
  EXPECT_NE(thrown_by([&] { Turned::apply(x * 2).sum().backward(); }).find("an exchange for aten::add"),
            std::string::npos);
  x.register_hook([](const at::Tensor& gradient) { return gradient.t(); });
  EXPECT_NE(thrown_by([&] { (x * 2).sum().backward(); }).find("an exchange for aten::add"), std::string::npos);
}

TEST(APart, HasNoGradientsOfGradients) {
  const QuietWarnings quiet;
  PartsByRows pass(0);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const at::Tensor x = part_of(drawn({4, 4}), 0).requires_grad_(), w = drawn({4}).requires_grad_();
  const at::Tensor y = x * w;
  const auto loss = [&] { return (Squares::apply(y, w) * 2).sum(); };
  EXPECT_THROW((void)torch::autograd::grad({loss()}, {x}, {}, true, /*create_graph=*/true), StateError);
  EXPECT_THROW((void)torch::autograd::grad({loss()}, {y}, {}, true, /*create_graph=*/true), StateError);
  EXPECT_THROW((void)torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true), StateError);
  EXPECT_THROW(loss().backward({}, true, /*create_graph=*/true), StateError);
  EXPECT_THROW(y.sum().backward({}, true, /*create_graph=*/true), StateError);
  EXPECT_THROW(torch::autograd::backward({y}, {at::ones_like(y)}, true, /*create_graph=*/true), StateError);
}

TEST(APart, IsCopiedAsAPart) {
  PartsByRows pass(1);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const at::Tensor values = drawn({5, 4}), other = drawn({5, 4});
  at::Tensor x = part_of(values, 1).requires_grad_();
  for (const at::Tensor& copy : {x.detach(), x.clone(), x.data(), x.variable_data(), x.tensor_data(), at::Tensor(x)}) {
    ASSERT_NE(PartTensor::of(copy), nullptr);
    EXPECT_EQ(copy.sizes(), at::IntArrayRef({5, 4}));
    EXPECT_TRUE(at::equal(local_of(copy), slice_of(values, *rows_of({5, 4}), 1)));
  }
  EXPECT_FALSE(x.detach().requires_grad());
  EXPECT_FALSE(x.data().requires_grad());
  const at::Tensor shallow(
      x.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
  EXPECT_FALSE(shallow.requires_grad());
  EXPECT_TRUE(shallow.is_leaf());
  at::Tensor(shallow).requires_grad_();
  (shallow * 2).sum().backward();
  EXPECT_FALSE(x.grad().defined());
  EXPECT_EQ(shallow.grad().sizes(), at::IntArrayRef({5, 4}));

  x.set_data(part_of(other, 1));
  EXPECT_TRUE(at::equal(local_of(x), slice_of(other, *rows_of({5, 4}), 1)));
  EXPECT_TRUE(x.requires_grad());
  x.set_data(part_of(drawn({7, 4}), 1));
  EXPECT_EQ(x.sizes(), at::IntArrayRef({7, 4}));
  at::Tensor whole = drawn({5, 4});
  EXPECT_THROW(x.set_data(whole), StateError);
  EXPECT_THROW(whole.set_data(x), StateError);
  EXPECT_THROW(x.set_data(part_of(drawn({7, 4}), 1).to(at::kFloat)), StateError);
  EXPECT_EQ(x.sizes(), at::IntArrayRef({7, 4}));

  const at::NoGradGuard no_grad;
  const at::Tensor y = x * 1;
  EXPECT_THROW(y.resize_({2, 2}), StateError);
  EXPECT_THROW(y.set_(), StateError);
  EXPECT_THROW(y.t_(), StateError);
  EXPECT_THROW(y.transpose_(0, 1), StateError);
  EXPECT_THROW(y.unsqueeze_(0), StateError);
  EXPECT_EQ(y.sizes(), at::IntArrayRef({7, 4}));
  EXPECT_NO_THROW(y.detach_());
  const at::Tensor view = y.view({28}), base(at::TensorBase(view._base()));
  EXPECT_THROW((void)base.sizes(), StateError);
  EXPECT_THROW((void)(base * 2), StateError);
}

TEST(APart, HasNoMemoryForAProgram) {
  PartsByRows pass(0);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const at::Tensor x = part_of(drawn({5, 4}), 0);
  const char* const kNone = "Cannot access data pointer of Tensor that doesn't have storage";
  EXPECT_NE(thrown_by([&] { (void)x.data_ptr(); }).find(kNone), std::string::npos);
  EXPECT_NE(thrown_by([&] { (void)x.const_data_ptr<double>(); }).find(kNone), std::string::npos);
  EXPECT_NE(thrown_by([&] { (void)x.accessor<double, 2>(); }).find(kNone), std::string::npos);
  EXPECT_NE(thrown_by([&] { (void)x.storage(); }).find("its memory is not a program's"), std::string::npos);
  EXPECT_NE(thrown_by([&] { (void)str(x); }), "");
  // Nor for an operator that gets it by mistake.
  const WithoutInterception inside;
  EXPECT_NE(thrown_by([&] { (void)(x + x); }).find(kNone), std::string::npos);
  EXPECT_NE(thrown_by([&] { (void)at::linear(x, at::ones({4, 4}, at::kDouble)); }), "");
  EXPECT_NE(thrown_by([&] { (void)x.view({-1}); }).find("its memory is not a program's"), std::string::npos);
}

TEST(APart, IsRefusedInTransforms) {
  PartsByRows pass(0);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const at::Tensor x = part_of(drawn({4, 4}), 0), whole = drawn({4, 4});
  const int64_t level = at::functorch::initAndPushDynamicLayer(at::functorch::TransformType::Vmap, 4,
                                                               at::functorch::RandomnessType::Error);
  EXPECT_THROW((void)(at::functorch::makeBatched(x, 0, level) * 2), StateError);
  EXPECT_THROW((void)(x * 2), StateError);
  EXPECT_NO_THROW((void)(at::functorch::makeBatched(whole, 0, level) * 2));
  at::functorch::popDynamicLayerAndDeleteMetadata();
  EXPECT_EQ((x * 2).size(0), 4);
}

TEST(APart, RefusesAHookOfItsNode) {
  struct Hook final : torch::autograd::FunctionPreHook {
    variable_list operator()(const variable_list& gradients) override { return gradients; }
  };
  PartsByRows pass(0);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  const at::Tensor x = part_of(drawn({4, 4}), 0).requires_grad_();
  {
    const at::Tensor y = x * 2;
    const at::Tensor loss = y.sum();
    y.grad_fn()->add_pre_hook(std::make_unique<Hook>());
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), StateError);
  }
  EXPECT_THROW((x * 2).sum().backward(), StateError);  // its node is gone
  EXPECT_NO_THROW((x * 2).sum().backward());
}

TEST(APart, IsOfEachRankThatIsAThread) {
  std::vector<std::thread> ranks;
  std::atomic<int> right = 0;
  const at::Tensor values = drawn({5, 4}), weight = drawn({4, 4});
  for (int thread = 0; thread < 4; ++thread)
    ranks.emplace_back([&, rank = thread % 2] {
      PartsByRows pass(rank);
      const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
      const auto of = rows_of({5, 4});
      for (int step = 0; step < 50; ++step) {
        const at::Tensor x = part_of(values, rank).requires_grad_(), w = weight.detach().clone().requires_grad_();
        const Block block = [&](const at::Tensor& y) { return sized(y, w); };
        const at::Tensor y = checkpoint(block, x * 2);
        y.sum().backward();
        right += y.size(0) == 5 && x.grad().size(0) == 5 &&
                 local_of(x.grad()).size(0) == of->placement.at(rank)[0].local(rank);
      }
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(right, 200);
}

TEST(APart, LetsGoOfItsMemory) {
  PartsByRows pass(0);
  const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
  c10::weak_intrusive_ptr<c10::TensorImpl> local(at::zeros({1}).getIntrusivePtr()), weak(local);
  {
    const at::Tensor x = part_of(drawn({4, 4}), 0).requires_grad_();
    local = c10::weak_intrusive_ptr<c10::TensorImpl>(local_of(x).getIntrusivePtr());
    weak = c10::weak_intrusive_ptr<c10::TensorImpl>(x.getIntrusivePtr());
    Squares::apply(x, at::ones({4}, at::kDouble)).sum().backward();
    (void)x.grad_fn();
    x.mutable_grad() = at::Tensor();
  }
  EXPECT_TRUE(weak.expired());
  EXPECT_TRUE(local.expired());
}

}  // namespace
}  // namespace trireme::testing
