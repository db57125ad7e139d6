// How passes stand in the chain, and what each of them may do with an operator.
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/counting_storage.h"
#include "tests/support/draw_from_slice.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

using testing::CountingStorage;
using testing::DrawFromSlice;
using Names = std::vector<std::string>;

/// A pass that does what it is told.
class Link final : public Pass {
 public:
  using Act = std::function<void(OperatorCall&, Next)>;
  Link(PassOrder order, Act act) : order_(order), act_(std::move(act)), scope_(InterceptScope::Watch::kAll, this) {}
  PassOrder order() const override { return order_; }
  void run(OperatorCall& call, Next next) override { act_(call, next); }

 private:
  const PassOrder order_;
  const Act act_;
  const InterceptScope scope_;
};

std::string name_of(const OperatorCall& call) { return call.op.schema().name().substr(6); }

/// Writes "name:operator" down.
Link::Act log_of(Names& names, const std::string& name) {
  return [&names, name](OperatorCall& call, Next next) {
    names.push_back(name + ":" + name_of(call));
    next(call);
  };
}

void give(OperatorCall& call, const at::Tensor& result) {
  torch::jit::drop(call.stack, call.traits.arguments);
  call.stack.emplace_back(result);
}

class Chain : public ::testing::Test {
 protected:
  /// linear by a matrix product of its own.
  static Link::Act own_linear() {
    return [](OperatorCall& call, Next next) {
      if (name_of(call) != "linear") return next(call);
      const at::Tensor input = call.arguments()[0].toTensor(), weight = call.arguments()[1].toTensor();
      give(call, next.run(call, [&] { return at::matmul(input, weight); }));
    };
  }

  const at::Tensor x = at::ones({2, 2}), weight = at::ones({2, 2});
  Names names;
};

TEST_F(Chain, PassesStandInTheirOrderWhicheverCameFirst) {
  const Link touch(PassOrder::kTouch, log_of(names, "touch")), tensor(PassOrder::kTensor, log_of(names, "tensor"));
  const Link ownership(PassOrder::kOwnership, log_of(names, "ownership"));
  const Link recompute(PassOrder::kRecompute, log_of(names, "recompute"));
  const Link sequence(PassOrder::kSequence, log_of(names, "sequence"));
  names.clear();
  x.add(1);
  EXPECT_EQ(names, (Names{"ownership:add", "sequence:add", "tensor:add", "recompute:add", "touch:add"}));
}

TEST_F(Chain, PassesOfOneOrderStandAsTheyCame) {
  const Link first(PassOrder::kTensor, log_of(names, "first")), second(PassOrder::kTensor, log_of(names, "second"));
  names.clear();
  x.add(1);
  EXPECT_EQ(names, (Names{"first:add", "second:add"}));
}

TEST_F(Chain, APassThatComputesTheResultsItselfTouchesNothing) {
  const auto owner = CountingStorage::manage(weight);
  const Link tensor(PassOrder::kTensor,
                    [&](OperatorCall& call, Next next) { name_of(call) == "linear" ? give(call, x) : next(call); });
  const Link later(PassOrder::kRecompute, log_of(names, "later"));
  names.clear();
  EXPECT_TRUE(at::linear(x, weight).is_same(x));
  EXPECT_TRUE(names.empty());
  EXPECT_TRUE(owner->accesses.empty());
}

TEST_F(Chain, WhatAPassRunsByItselfIsSeenByTheLaterLinksAndTheTouch) {
  const auto owner = CountingStorage::manage(weight);
  std::vector<int> depths;
  std::vector<uint64_t> serials;
  const Link earlier(PassOrder::kSequence, log_of(names, "earlier"));
  const Link tensor(PassOrder::kTensor, own_linear());
  const Link later(PassOrder::kRecompute, [&](OperatorCall& call, Next next) {
    names.push_back("later:" + name_of(call));
    depths.push_back(call.depth);
    serials.push_back(RankContext::current()->serial());
    next(call);
  });
  names.clear();
  depths.clear();
  serials.clear();
  const uint64_t serial = RankContext::current()->serial();
  at::linear(x, weight);
  x.add(1);
  EXPECT_EQ(names, (Names{"earlier:linear", "later:matmul", "earlier:add", "later:add"}));
  EXPECT_EQ(depths, (std::vector{1, 0}));
  EXPECT_EQ(serials, (std::vector{serial + 1, serial + 2}));
  EXPECT_EQ(owner->accesses, std::vector{Access::kRead});
}

TEST_F(Chain, AReleasedStorageIsBackForWhatAPassRunsByItself) {
  const auto owner = CountingStorage::manage(weight);
  owner->release(*weight.storage().unsafeGetStorageImpl());
  const Link tensor(PassOrder::kTensor, own_linear());
  EXPECT_TRUE(at::equal(at::linear(x, weight), at::ones({2, 2}) * 2));
}

TEST_F(Chain, OtherOperatorsOfAPassAreSeenByNobody) {
  const Link tensor(PassOrder::kTensor, [](OperatorCall& call, Next next) {
    at::silu(call.arguments()[0].toTensor());
    next(call);
  });
  const Link later(PassOrder::kRecompute, log_of(names, "later"));
  names.clear();
  x.add(1);
  EXPECT_EQ(names, Names{"later:add"});
}

TEST_F(Chain, APassMayGiveOtherArguments) {
  const Link tensor(PassOrder::kTensor, [](OperatorCall& call, Next next) {
    if (name_of(call) == "add") torch::jit::peek(call.stack, 0, call.traits.arguments) = at::ones({2, 2}) * 5;
    next(call);
  });
  EXPECT_TRUE(at::equal(x.add(1), at::ones({2, 2}) * 6));
}

TEST_F(Chain, PartsOfAnOpenedOperatorRunFromTheOpenerOn) {
  const Link earlier(PassOrder::kTensor, log_of(names, "earlier"));
  const Link opener(PassOrder::kRecompute, [&](OperatorCall& call, Next next) {
    names.push_back("opener:" + name_of(call));
    call.traits.composite ? next.open(call) : next(call);
  });
  names.clear();
  x.flatten();
  EXPECT_EQ(names, (Names{"earlier:flatten", "opener:flatten", "opener:view"}));
}

TEST_F(Chain, TheFirstOfTwoOpenersSeesTheParts) {
  const auto open = [](OperatorCall& call, Next next) { next.open(call); };
  const Link first(PassOrder::kTensor, [&](OperatorCall& call, Next next) {
    names.push_back(name_of(call));
    next.open(call);
  });
  const Link second(PassOrder::kRecompute, open);
  names.clear();
  x.flatten();
  EXPECT_EQ(names, (Names{"flatten", "view"}));
}

TEST_F(Chain, WhatIsThrownLeavesItAsItWas) {
  struct Stop {};  // as recompute()'s, no std::exception
  bool stops = true;
  const Link outer(PassOrder::kTensor, own_linear());
  const Link inner(PassOrder::kRecompute, [&](OperatorCall& call, Next next) {
    names.push_back(name_of(call));
    if (stops && call.depth > 0) throw Stop();
    call.traits.composite ? next.open(call) : next(call);
  });
  names.clear();
  EXPECT_THROW(at::linear(x, weight), Stop);
  EXPECT_THROW(x.flatten(), Stop);
  stops = false;
  x.add(1);
  at::linear(x, weight);
  EXPECT_EQ(names, (Names{"matmul", "flatten", "view", "add", "matmul", "mm"}));
  EXPECT_FALSE(c10::impl::tls_is_dispatch_key_excluded(kInterceptKey));
}

TEST_F(Chain, ChainFromLeavesTheEarlierPassesOut) {
  const Link tensor(PassOrder::kTensor, log_of(names, "tensor")),
      recompute(PassOrder::kRecompute, log_of(names, "recompute"));
  const Link touch(PassOrder::kTouch, log_of(names, "touch"));
  names.clear();
  {
    const ChainFrom chain(PassOrder::kRecompute, RandomStream::kModel);
    x.add(1);
  }
  x.mul(2);
  EXPECT_EQ(names, (Names{"recompute:add", "touch:add", "tensor:mul", "recompute:mul", "touch:mul"}));
}

TEST_F(Chain, PartsDrawFromTheStreamOfTheirOperator) {
  std::vector<RandomStream> streams;
  const DrawFromSlice slices("aten::linear");
  const Link tensor(PassOrder::kTensor, own_linear());
  const Link later(PassOrder::kRecompute, [&](OperatorCall& call, Next next) {
    streams.push_back(call.stream);
    call.traits.composite ? next.open(call) : next(call);
  });
  streams.clear();
  at::linear(x, weight);
  x.add(1);
  EXPECT_EQ(streams,
            (std::vector{RandomStream::kSlice, RandomStream::kSlice, RandomStream::kModel}));  // matmul, mm, add
}

}  // namespace
}  // namespace trireme
