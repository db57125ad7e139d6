// The cost of a part that tells a program the whole's sizes: of wrapping a result, of the tensor that operators get,
// and of asking for a size.
//
// Variants take turns in one run, so that a change of the machine's speed hits all alike; min and median of the rounds
// are printed.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "benchmarks/flags.h"
#include "benchmarks/times.h"
#include "trireme/activations/call_arguments.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/intercept.h"

namespace {

using namespace trireme;
using benchmarks::ns_per_call;
using benchmarks::print;
using benchmarks::Times;

class LooksAtNothing final : public Pass {
 public:
  PassOrder order() const override { return PassOrder::kTensor; }
  void run(OperatorCall& call, Next next) override { next(call); }
};

/// Gives operators that take parts their local tensors, and wraps one result as what the first part is of.
class WrapsAsTheFirst final : public Pass {
 public:
  PassOrder order() const override { return PassOrder::kTensor; }
  void run(OperatorCall& call, Next next) override {
    if (!has_parts(call)) return next(call);
    std::shared_ptr<const PartOf> of;
    for (uint32_t i = 0; i < call.traits.arguments; ++i) {
      c10::IValue& value = argument(call, i);
      if (!value.isTensor()) continue;
      if (PartTensor* const part = PartTensor::of(value.toTensor())) {
        of = part->known();
        value = part->local();
      }
    }
    next(call);
    call.stack.back() = PartTensor::wrap(std::move(call.stack.back()).toTensor(), of);
  }
};

constexpr const char* kAbout =
    "what a part that tells a program the whole's sizes costs, in ns per call on one thread: beside an operator, and\n"
    "by itself. Variants take turns in one run, so that a change of the machine's speed hits all alike; min and\n"
    "median of the rounds are printed.";

}  // namespace

int main(int argc, char** argv) {
  bool smoke = false;
  benchmarks::Flags("part_tensor_bench", kAbout)
      .on("--smoke", smoke, "2 rounds of 100 calls in place of 60 of 5000: does it work?")
      .parse(argc, argv);
  const int rounds = smoke ? 2 : 60;
  const int calls = smoke ? 100 : 5000;
  at::set_num_threads(1);
  const auto of = std::make_shared<const PartOf>(PartOf{{16, 8}, Placement(2)});
  const at::Tensor x = at::ones({8, 8}), y = at::ones({8, 8});
  const at::Tensor w = at::ones({8, 8}).requires_grad_();
  const at::Tensor part = PartTensor::wrap(at::ones({8, 8}), of), other = PartTensor::wrap(at::ones({8, 8}), of);

  Times plain{"add [8, 8], a pass that looks at nothing", {}};
  Times unlike{"add [8, 8], a pass that looks for parts", {}};
  Times parts{"add [8, 8] of two parts", {}};
  Times plain_graph{"add [8, 8] with a gradient, looks at nothing", {}};
  Times parts_graph{"add [8, 8] with a gradient, of a part", {}};
  Times wrap{"wrap()", {}}, wrap_graph{"wrap() of a tensor with a history", {}}, local{"local()", {}};
  Times size{"size(1) of a part", {}}, plain_size{"size(1)", {}};
  LooksAtNothing nothing;
  WrapsAsTheFirst wraps;
  int64_t sum = 0;
  for (int round = 0; round < rounds; ++round) {
    {
      const InterceptScope scope(InterceptScope::Watch::kWrites, &nothing);
      plain_graph.ns.push_back(ns_per_call(calls, [&] { at::add(x, w); }));
      const at::NoGradGuard no_grad;
      plain.ns.push_back(ns_per_call(calls, [&] { at::add(x, y); }));
    }
    const InterceptScope scope(InterceptScope::Watch::kWrites, &wraps);
    parts_graph.ns.push_back(ns_per_call(calls, [&] { at::add(part, w); }));
    size.ns.push_back(ns_per_call(calls, [&] { sum += part.size(1); }));
    plain_size.ns.push_back(ns_per_call(calls, [&] { sum += x.size(1); }));
    {
      const at::NoGradGuard no_grad;
      unlike.ns.push_back(ns_per_call(calls, [&] { at::add(x, y); }));
      parts.ns.push_back(ns_per_call(calls, [&] { at::add(part, other); }));
    }
    const WithoutInterception inside;
    std::vector<at::Tensor> fresh(calls), with_history(calls);
    for (at::Tensor& one : fresh) one = x.detach();
    for (at::Tensor& one : with_history) one = x + w;
    size_t next = 0, next_with_history = 0;
    wrap.ns.push_back(ns_per_call(calls, [&] { PartTensor::wrap(std::move(fresh[next++]), of); }));
    wrap_graph.ns.push_back(
        ns_per_call(calls, [&] { PartTensor::wrap(std::move(with_history[next_with_history++]), of); }));
    PartTensor* const known = PartTensor::of(part);
    local.ns.push_back(ns_per_call(calls, [&] { sum += known->local().defined() ? 1 : 0; }));
  }
  std::printf("ns per call, one thread, %d rounds of %d calls (%s)               min    median\n", rounds, calls,
              sum > 0 ? "all sizes read" : "none");
  for (const Times* times :
       {&plain, &unlike, &parts, &plain_graph, &parts_graph, &wrap, &wrap_graph, &local, &size, &plain_size})
    print(*times);
  std::printf("parts above the operator: %.0f ns, with a gradient %.0f ns; limit 1000\n", parts.more_than(plain),
              parts_graph.more_than(plain_graph));
  std::printf("a pass that looks for parts, of tensors that are none: %.0f ns; limit 20\n", unlike.more_than(plain));
  return 0;
}
