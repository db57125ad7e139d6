// The work of models by their modules' calls: closed forms, forward, backward and recomputed.
#include "trireme/observe/work_count.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/utils.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/models/language_model.h"

namespace trireme::testing {
namespace work_count_test {

WorkSums total(const WorkCount& count) {
  WorkSums sums;
  for (const WorkCall& call : count.calls()) {
    sums.forward += call.sums.forward;
    sums.backward += call.sums.backward;
    sums.recomputed += call.sums.recomputed;
  }
  return sums;
}

WorkCall call_of(const WorkCount& count, int64_t module) {
  const std::vector<WorkCall> calls = count.calls();
  const auto found = std::ranges::find(calls, module, &WorkCall::module);
  return found == calls.end() ? WorkCall{.module = -2} : *found;
}

/// Multiply-adds of B samples of S tokens by the closed form of trireme/models/language_model.h, which has FLOPs of
/// forward and backward of a token: three times the forward.
int64_t closed_form(const ModelOptions& options, int64_t B, int64_t S) {
  return training_flops_per_token(options, S) / 2 * B * S;
}

TEST(WorkCount, OfTheBuiltInModelsIsTheClosedForm) {
  const LlamaOptions llama = {.vocab_size = 11,
                              .hidden_size = 24,
                              .intermediate_size = 20,
                              .num_hidden_layers = 3,
                              .num_attention_heads = 4,
                              .num_key_value_heads = 2,
                              .head_dim = 10};
  const GptOptions gpt = {.vocab_size = 11, .n_embd = 24, .n_layer = 2, .n_head = 4, .n_positions = 9};
  struct Case {
    ModelOptions options;
    int64_t attention;  // layers * heads * head size
  };
  for (const Case& one : {Case{llama, 3 * 4 * 10}, Case{gpt, 2 * 24}}) {
    constexpr int64_t B = 2, S = 7;
    const auto model = make_language_model(one.options);
    const at::Tensor tokens = at::randint(0, 11, {B, S}, at::kLong);
    WorkCount count;
    count.start();
    model->forward(tokens).sum().backward();
    count.stop();
    // The kernel of attention keeps no scores, and computes them once more in backward.
    const int64_t scores = one.attention * S * B * S;
    EXPECT_EQ(total(count).forward * 3, closed_form(one.options, B, S));
    EXPECT_EQ(total(count).forward + total(count).backward, closed_form(one.options, B, S) + scores);
    EXPECT_TRUE(count.uncounted().empty());
  }
}

TEST(WorkCount, GivesOperatorsToTheModulesThatAreCalledAndGradientsToThoseThatRecordedThem) {
  const at::Tensor a = at::rand({2, 3}).requires_grad_(), b = at::rand({3, 5}).requires_grad_(),
                   c = at::rand({5, 7}).requires_grad_();
  WorkCount count;
  count.start();
  count.enter(1);
  const at::Tensor ab = at::matmul(a, b);
  count.enter(2);
  const at::Tensor abc = at::matmul(ab, c);
  count.leave(2);
  count.leave(1);
  (abc.sum() + at::mm(a, b).sum()).backward();
  count.stop();
  at::mm(a, b);
  const WorkCall outer = call_of(count, 1), inner = call_of(count, 2), root = call_of(count, -1);
  EXPECT_EQ(count.calls()[inner.caller].module, 1);
  EXPECT_EQ(count.calls()[outer.caller].module, -1);
  EXPECT_EQ(outer.sums.forward, 2 * 3 * 5);
  EXPECT_EQ(inner.sums.forward, 2 * 5 * 7);
  EXPECT_EQ(root.sums.forward, 2 * 3 * 5);
  EXPECT_EQ(outer.sums.backward, 2 * (2 * 3 * 5));
  EXPECT_EQ(inner.sums.backward, 2 * (2 * 5 * 7));
  EXPECT_EQ(root.sums.backward, 2 * (2 * 3 * 5));
  EXPECT_EQ(outer.calls, 1);
  EXPECT_GE(outer.seconds, inner.seconds);
}

TEST(WorkCount, AddsUpTheCallsOfAModuleThatIsUsedTwice) {
  const at::Tensor a = at::rand({3, 3}).requires_grad_();
  WorkCount count;
  count.start();
  at::Tensor x = a;
  for (int i = 0; i < 2; ++i) {
    count.enter(4);
    x = at::mm(x, a);
    count.leave(4);
  }
  x.sum().backward();
  count.stop();
  EXPECT_EQ(count.calls().size(), 2);
  EXPECT_EQ(call_of(count, 4).calls, 2);
  EXPECT_EQ(call_of(count, 4).sums.forward, 2 * 27);
  EXPECT_EQ(call_of(count, 4).sums.backward, 4 * 27);
}

/// Calls a module again in backward, as activation checkpointing does.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            int64_t count) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["count"] = count;
    return run(x, weight, *reinterpret_cast<WorkCount*>(count));  // NOLINT(performance-no-int-to-ptr)
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor x = saved[0].detach().requires_grad_(), weight = saved[1].detach().requires_grad_();
    at::AutoGradMode with_graph(true);
    const int64_t count = ctx->saved_data["count"].toInt();
    const at::Tensor result = run(x, weight, *reinterpret_cast<WorkCount*>(count));  // NOLINT
    torch::autograd::backward({result}, {gradients[0]});
    return {x.grad(), weight.grad(), at::Tensor()};
  }
  static at::Tensor run(const at::Tensor& x, const at::Tensor& weight, WorkCount& count) {
    count.enter(2);
    at::Tensor result = at::mm(x, weight);
    count.leave(2);
    return result;
  }
};

TEST(WorkCount, TellsWhatBackwardComputesAgainUnderTheCallerThatItHadInForward) {
  const at::Tensor x = at::rand({2, 3}).requires_grad_(), weight = at::rand({3, 5}).requires_grad_();
  WorkCount count;
  count.start();
  count.enter(1);
  const at::Tensor result = Recomputed::apply(x, weight, reinterpret_cast<int64_t>(&count));
  count.leave(1);
  result.sum().backward();
  count.stop();
  EXPECT_EQ(count.calls().size(), 3);
  const WorkCall inner = call_of(count, 2);
  EXPECT_EQ(count.calls()[inner.caller].module, 1);
  EXPECT_EQ(inner.calls, 1);
  EXPECT_EQ(inner.sums.forward, 30);
  EXPECT_EQ(inner.sums.recomputed, 30);
  EXPECT_EQ(inner.sums.backward, 60);
}

TEST(WorkCount, EndsCallsThatAnExceptionHasLeft) {
  WorkCount count;
  count.start();
  count.enter(1);
  count.enter(2);
  count.leave(1);
  at::mm(at::rand({2, 2}), at::rand({2, 2}));
  count.stop();
  EXPECT_EQ(call_of(count, -1).sums.forward, 8);
}

TEST(WorkCount, CountsTheProductsInsideOfComposedOperatorsAndNamesThoseThatItCannot) {
  const at::Tensor a = at::rand({2, 3, 4}), b = at::rand({2, 4, 5}), c = at::rand({2, 5, 6});
  WorkCount count;
  count.start();
  at::einsum("bij,bjk->bik", {a, b});
  at::tensordot(a, b, {2}, {1});
  EXPECT_EQ(total(count).forward, 2 * 3 * 4 * 5 + 2 * 3 * 4 * 2 * 5);
  count.reset();
  at::bilinear(at::rand({7, 2}), at::rand({7, 3}), at::rand({4, 2, 3}), {});
  EXPECT_EQ(total(count).forward, 0);
  EXPECT_EQ(count.uncounted(), (std::unordered_map<std::string, int64_t>{{"aten::_trilinear", 1}}));
  count.stop();
}

TEST(WorkCount, RefusesToCountTwiceAndToStopElsewhere) {
  WorkCount count;
  count.start();
  EXPECT_THROW(count.start(), StateError);
  std::thread([&count] { EXPECT_THROW(count.stop(), StateError); }).join();
  count.stop();
  EXPECT_FALSE(count.is_running());
}

}  // namespace work_count_test
}  // namespace trireme::testing
