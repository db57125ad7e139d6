// The cost of interception per operator, and of touching a unit that is whole already.
//
// Variants take turns in one run, so that a change of the machine's speed hits all alike; min and median of the rounds
// are printed.
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <cstdio>

#include "benchmarks/flags.h"
#include "benchmarks/times.h"
#include "trireme/comm/threads.h"
#include "trireme/intercept.h"
#include "trireme/pager/pager.h"
#include "trireme/sequence/sequence_parallel.h"
#include "trireme/tensor/tensor_parallel.h"

namespace {

using namespace trireme;
using benchmarks::ns_per_call;
using benchmarks::print;
using benchmarks::Times;

/// A model of one unit under the copy policy, whole after the first touch.
struct Paged {
  explicit Paged(Group& group)
      : pager(group, {{"weight", weight}},
              {.stage = 3, .gather = GatherPolicy::kCopy, .units = {.merge_below_bytes = 0}}) {}
  at::Tensor weight = at::ones({8, 8}).requires_grad_();
  Pager pager;
};

/// Parameters of which the first rank of two has the first half of their rows.
struct Sliced {
  enum class SaysSizesOf { kSlice, kWhole };

  explicit Sliced(Group& group, SaysSizesOf says = SaysSizesOf::kSlice) : parallel(group) {
    if (says == SaysSizesOf::kWhole) parallel.give_parts();
    for (at::Tensor& weight : weights) {
      weight = at::ones({8, 8});
      parallel.add(weight, {{{16, 8}, 0, {{0, 8}}}, {{16, 8}, 0, {{8, 16}}}});
    }
  }
  std::array<at::Tensor, 64> weights;
  TensorParallel parallel;
};

class LooksAtNothing final : public Pass {
 public:
  PassOrder order() const override { return PassOrder::kTensor; }
  void run(OperatorCall& call, Next next) override { next(call); }
};

constexpr const char* kAbout =
    "what interception costs per operator, and what a touch of a unit costs that is whole already, in ns per call\n"
    "on one thread. Variants take turns in one run, so that a change of the machine's speed hits all alike; min and\n"
    "median of the rounds are printed.";

}  // namespace

int main(int argc, char** argv) {
  bool smoke = false;
  benchmarks::Flags("intercept_bench", kAbout)
      .on("--smoke", smoke, "2 rounds of 100 calls in place of 60 of 5000: does it work?")
      .parse(argc, argv);
  const int rounds = smoke ? 2 : 60;
  const int calls = smoke ? 100 : 5000;
  at::NoGradGuard no_grad;
  at::set_num_threads(1);
  const at::Tensor x = at::ones({8, 8}), y = at::ones({8, 8});
  auto groups = make_thread_groups(1);
  auto pairs = make_thread_groups(2);  // of which one rank runs operators without an exchange
  const auto act = [&] { at::add(x, y); };

  Times off{"add [8, 8], interception off", {}};
  Times writes{"add [8, 8], writes watched", {}};
  Times all{"add [8, 8], reads watched too", {}};
  Times passed{"add [8, 8], a pass that looks at nothing", {}};
  Times touch{"add [8, 8] of a unit that is whole", {}};
  Times parallel_unused{"add [8, 8], sequence parallelism that has cut nothing", {}};
  Times parallel{"add [8, 8], neither of a sequence that was cut", {}};
  Times slices{"add [8, 8] beside 64 slices, neither of them", {}};
  Times of_slices{"add [8, 8] of two slices", {}};
  Times of_parts{"add [8, 8] of two slices that say the whole's sizes", {}};
  Times view_of_part{"transpose [8, 8] of such a slice", {}};
  Times view_of_slice{"transpose [8, 8] of a slice", {}};
  Times of_tokens{"add [8, 8] of two parts of a sequence", {}};
  Times view_of_tokens{"transpose [8, 8] of a part of a sequence", {}};
  Times view{"transpose [8, 8], interception off", {}};
  LooksAtNothing pass;
  for (int round = 0; round < rounds; ++round) {
    off.ns.push_back(ns_per_call(calls, act));
    view.ns.push_back(ns_per_call(calls, [&] { x.transpose(0, 1); }));
    {
      InterceptScope scope(InterceptScope::Watch::kWrites);
      writes.ns.push_back(ns_per_call(calls, act));
    }
    {
      InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
      passed.ns.push_back(ns_per_call(calls, act));
    }
    {
      SequenceParallel sequence(*groups[0]);
      parallel_unused.ns.push_back(ns_per_call(calls, act));
      const at::Tensor ids = at::ones({1, 64}, at::kLong);
      const SequenceInputs part = sequence.cut({.input_ids = ids, .labels = ids, .position_ids = ids});
      parallel.ns.push_back(ns_per_call(calls, act));
    }
    {
      const Sliced sliced(*pairs[0]);
      slices.ns.push_back(ns_per_call(calls, act));
      of_slices.ns.push_back(ns_per_call(calls, [&] { at::add(sliced.weights[0], sliced.weights[1]); }));
      view_of_slice.ns.push_back(ns_per_call(calls, [&] { sliced.weights[0].transpose(0, 1); }));
    }
    {
      const Sliced sliced(*pairs[0], Sliced::SaysSizesOf::kWhole);
      const at::Tensor a = sliced.weights[0] * 1, b = sliced.weights[1] * 1;
      of_parts.ns.push_back(ns_per_call(calls, [&] { at::add(a, b); }));
      view_of_part.ns.push_back(ns_per_call(calls, [&] { a.transpose(0, 1); }));
    }
    {
      SequenceParallel sequence(*pairs[0]);
      const at::Tensor part = sequence.cut(at::ones({16, 8}), 0), other = sequence.cut(at::ones({16, 8}), 0);
      // A part that is known whole is computed whole.
      const at::Tensor a = at::add(part, at::ones({8}).requires_grad_()), b = at::add(other, at::ones({8}));
      of_tokens.ns.push_back(ns_per_call(calls, [&] { at::add(a, b); }));
      view_of_tokens.ns.push_back(ns_per_call(calls, [&] { a.transpose(0, 1); }));
    }
    InterceptScope scope(InterceptScope::Watch::kAll);
    all.ns.push_back(ns_per_call(calls, act));
    Paged paged(*groups[0]);
    touch.ns.push_back(ns_per_call(calls, [&] { at::add(paged.weight, y); }));
    paged.pager.restore();
  }
  std::printf("ns per operator, one thread, %d rounds of %d calls                min    median\n", rounds, calls);
  for (const Times* times : {&off, &writes, &all, &passed, &parallel_unused, &parallel, &slices, &of_slices, &of_parts,
                             &of_tokens, &view, &view_of_slice, &view_of_part, &view_of_tokens, &touch})
    print(*times);
  std::printf(
      "interception of an operator that touches nothing managed: %.0f ns (writes watched), %.0f ns (reads too); limit "
      "150\n",
      writes.more_than(off), all.more_than(off));
  std::printf("with a pass that looks at nothing: %.0f ns; limit 200\n", passed.more_than(off));
  std::printf("with sequence parallelism, of tensors that are not sharded: %.0f ns\n", parallel.more_than(off));
  std::printf("operator beside slices, of tensors that are not cut: %.0f ns; limit 200\n", slices.more_than(off));
  std::printf("operator on slices, without an exchange: %.0f ns (add), %.0f ns (transpose)\n", of_slices.more_than(off),
              view_of_slice.more_than(view));
  std::printf("the same of slices that say the whole's sizes: %.0f ns (add), %.0f ns (transpose)\n",
              of_parts.more_than(off), view_of_part.more_than(view));
  std::printf("operator on parts of a sequence, without an exchange: %.0f ns (add), %.0f ns (transpose)\n",
              of_tokens.more_than(off), view_of_tokens.more_than(view));
  std::printf("a touch of a unit that is whole: %.0f ns; limit 3000\n", touch.more_than(off));
  return 0;
}
