// The cost of an operator where stages own parts of an unmodified model: of one whose result is a tensor without
// memory, one that this stage computes, one that every stage computes.
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <barrier>
#include <cstdio>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "benchmarks/flags.h"
#include "benchmarks/times.h"
#include "trireme/comm/threads.h"
#include "trireme/intercept.h"
#include "trireme/ownership/ownership.h"

namespace {

using namespace trireme;
using benchmarks::ns_per_call;
using benchmarks::print;
using benchmarks::Times;

constexpr int64_t kBatch = 2, kTokens = 16, kWidth = 32, kInner = 64, kHeads = 4, kKeyHeads = 2;

/// A layer of Llama, operator by operator as the Transformers library computes it.
struct Layer {
  std::array<at::Tensor, 2> norms;
  at::Tensor query, key, value, output, gate, up, down;
  at::Tensor cos = at::ones({kBatch, kTokens, kWidth / kHeads}), sin = cos.clone();  // every stage has them

  template <class Make>
  explicit Layer(const Make& make)
      : norms{make({kWidth}), make({kWidth})},
        query(make({kWidth, kWidth})),
        key(make({kWidth / kHeads * kKeyHeads, kWidth})),
        value(make({kWidth / kHeads * kKeyHeads, kWidth})),
        output(make({kWidth, kWidth})),
        gate(make({kInner, kWidth})),
        up(make({kInner, kWidth})),
        down(make({kWidth, kInner})) {}

  static at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) {
    const at::Tensor wide = x.to(at::kFloat);
    const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);
    return weight * (wide * (variance + 1e-6).rsqrt()).to(x.scalar_type());
  }
  static at::Tensor heads(const at::Tensor& x) {
    return x.view({kBatch, kTokens, -1, kWidth / kHeads}).transpose(1, 2);
  }
  static at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    const int64_t half = kWidth / kHeads / 2;
    return x * cos + at::cat({-x.slice(3, half), x.slice(3, 0, half)}, -1) * sin;
  }
  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor normed = norm(x, norms[0]);
    const at::Tensor q = heads(at::linear(normed, query)), k = heads(at::linear(normed, key));
    const at::Tensor v = heads(at::linear(normed, value)), cosines = cos.unsqueeze(1), sines = sin.unsqueeze(1);
    const at::Tensor mixed =
        at::scaled_dot_product_attention(rotated(q, cosines, sines), rotated(k, cosines, sines), v, {}, 0.0,
                                         /*is_causal=*/true, std::nullopt, /*enable_gqa=*/true);
    const at::Tensor joined = mixed.transpose(1, 2).reshape({kBatch, kTokens, kWidth}).contiguous();
    const at::Tensor attended = x + at::linear(joined, output);
    const at::Tensor again = norm(attended, norms[1]);
    return attended + at::linear(at::silu(at::linear(again, gate)) * at::linear(again, up), down);
  }
};

/// The parameters of a layer on one stage, or on all.
Layer layer_of(Ownership& ownership, std::optional<int> stage) {
  return Layer([&](at::IntArrayRef sizes) {
    const at::Tensor weight = at::ones(sizes).requires_grad_();
    if (stage) ownership.own(weight, *stage, "weight");
    return weight;
  });
}

/// A layer, as the stage that is measured sees it.
struct Variant {
  const char* name;
  const Layer* layer;
  bool in_a_step;
  Times times{name, {}}, with_gradients{"  with gradients", {}};
};

/// One of two stages, that takes turns with the other one: one core is enough.
class Stage {
 public:
  Stage(Group& stages, std::barrier<>& turn) : ownership_(stages, c10::kCPU), turn_(turn) {}

  /// Runs `layer` a number of times, as a micro-batch. Returns what an operator took.
  double run(const Layer& layer, int calls, bool takes_turns) {
    const bool is_second = ownership_.stage() == 1;
    if (takes_turns && is_second) turn_.arrive_and_wait();
    auto micro_batch = ownership_.begin(number_++, 0);
    double ns = 0;
    {
      const Ownership::Scope forward(ownership_, *micro_batch);
      ns = of_an_operator(layer, calls);
      ownership_.end_forward({});
    }
    if (takes_turns && !is_second) turn_.arrive_and_wait();
    ownership_.finish();
    return ns;
  }
  double of_an_operator(const Layer& layer, int calls) const {
    return ns_per_call(calls, [&] { layer.forward(x_); }) / static_cast<double>(operators_);
  }
  int64_t count_operators(const Layer& layer) {
    const uint64_t before = RankContext::of_this_thread().serial();
    layer.forward(x_);
    return operators_ = static_cast<int64_t>(RankContext::of_this_thread().serial() - before);
  }
  Ownership& ownership() { return ownership_; }

 private:
  Ownership ownership_;
  std::barrier<>& turn_;
  const at::Tensor x_ = at::ones({kBatch, kTokens, kWidth});
  int64_t number_ = 0, operators_ = 1;
};

void measure(Stage& stage, int rounds, int calls) {
  const Layer plain = layer_of(stage.ownership(), {}), replicated = layer_of(stage.ownership(), {});
  const Layer own = layer_of(stage.ownership(), 0), remote = layer_of(stage.ownership(), 1);
  const int64_t operators = stage.count_operators(plain);
  Variant none{"without interception", &plain, false}, outside{"outside of a step", &plain, false};
  Variant all{"replicated", &replicated, true}, owns{"own", &own, true}, others{"remote", &remote, true};
  const auto run = [&](Variant& variant, bool takes_turns) {
    if (variant.in_a_step) return stage.run(*variant.layer, calls, takes_turns);
    if (&variant == &outside) return stage.of_an_operator(*variant.layer, calls);
    const WithoutInterception ordinary;
    return stage.of_an_operator(*variant.layer, calls);
  };
  const std::array variants{&none, &outside, &all, &owns, &others};
  for (int round = -1; round < rounds; ++round)  // the first one tells sizes
    for (const bool has_gradients : {false, true}) {
      const at::AutoGradMode mode(has_gradients);
      for (Variant* const variant : variants) {
        if (!variant->in_a_step && stage.ownership().stage() != 0) continue;
        const double ns = run(*variant, round >= 0);
        if (round >= 0) (has_gradients ? variant->with_gradients : variant->times).ns.push_back(ns);
      }
    }
  if (stage.ownership().stage() != 0) return;
  std::printf("ns per operator of a layer of %ld operators, one thread, %d rounds of %d  min    median\n",
              static_cast<long>(operators), rounds, calls);
  for (const Variant* const variant : variants) {
    print(variant->times);
    print(variant->with_gradients);
  }
  for (const Variant* const variant : {&outside, &all, &owns})
    std::printf("%s: %.0f ns more than without interception, with gradients %.0f%s\n", variant->name,
                variant->times.more_than(none.times), variant->with_gradients.more_than(none.with_gradients),
                variant->in_a_step ? "; limit 300" : "");
  std::printf("remote: %.0f ns, with gradients %.0f; limit 3000\n", others.times.median(),
              others.with_gradients.median());
}

constexpr const char* kAbout =
    "what an operator costs, in ns, where stages own parts of a model: remote (its result is a tensor without "
    "memory),\n"
    "own (this stage computes it) and replicated (every stage does). Operators are those of a small layer of Llama, "
    "in\n"
    "C++ on one thread; what Python's call of an operator costs is not in it. The other stage is a thread that waits\n"
    "meanwhile. Variants take turns in one run; min and median of the rounds.";

}  // namespace

int main(int argc, char** argv) {
  bool smoke = false;
  benchmarks::Flags("ownership_bench", kAbout)
      .on("--smoke", smoke, "2 rounds of 2 layers in place of 600 of 10: does it work?")
      .parse(argc, argv);
  const int rounds = smoke ? 2 : 600;
  const int calls = smoke ? 2 : 10;  // short rounds: a busy host interrupts few of them
  at::set_num_threads(1);
  const auto groups = make_thread_groups(2);
  std::barrier turn(2);
  std::vector<std::thread> threads;
  for (const auto& group : groups)
    threads.emplace_back([&] {
      at::set_num_threads(1);
      Stage stage(*group, turn);
      measure(stage, rounds, calls);
    });
  for (std::thread& thread : threads) thread.join();
  return 0;
}
