// Ranks that are threads draw from streams of their own.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/rrelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/rnn.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/draw_by_seeds.h"
#include "tests/support/draw_from_slice.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

struct Draw {
  std::string name;
  std::function<at::Tensor()> draw;
};

std::vector<Draw> all_draws() {
  const at::Tensor ones = at::ones({100});
  return {
      {"randn", [] { return at::randn({100}); }},
      {"randint", [] { return at::randint(0, 1000, {100}); }},
      {"randperm", [] { return at::randperm(100); }},
      {"normal_", [] { return at::ones({100}).normal_(1, 2); }},
      {"uniform_", [] { return at::ones({100}).uniform_(); }},
      {"exponential_", [] { return at::ones({100}).exponential_(); }},
      {"bernoulli", [ones] { return at::bernoulli(ones * 0.5); }},
      {"multinomial", [ones] { return at::multinomial(ones, 20); }},
      {"dropout", [ones] { return at::dropout(ones, 0.5, true); }},
      {"rrelu", [ones] { return at::rrelu(ones.neg(), 0.1, 0.9, true); }},
      {"xavier_normal_",
       [] {
         return torch::nn::init::xavier_normal_(at::ones({10, 10}));
       }},
      {"scaled_dot_product_attention",
       [] {
         const at::Tensor x_BHSE = at::ones({1, 2, 8, 4});  // batch, heads, sequence, features
         return at::scaled_dot_product_attention(x_BHSE, x_BHSE, x_BHSE, {}, 0.5);
       }},
      {"LSTM with dropout",
       [] {
         torch::nn::LSTM lstm(torch::nn::LSTMOptions(4, 4).num_layers(2).dropout(0.5));
         return std::get<0>(lstm->forward(at::ones({5, 1, 4}))).detach();
       }},
  };
}

void in_rank(uint64_t seed, const std::function<void()>& body) {
  std::thread([&] {
    RankContext::of_this_thread().streams().use_own_generator(seed);
    InterceptScope scope(InterceptScope::Watch::kWrites);
    body();
  }).join();
}

at::Tensor default_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

TEST(OwnGenerator, GivesWhatTheDefaultGeneratorGivesUnderTheSameSeedAndLeavesThatAlone) {
  for (const Draw& draw : all_draws()) {
    manual_seed(7);
    const at::Tensor expected = draw.draw();
    const at::Tensor next = draw.draw();
    const at::Tensor state = default_state();
    in_rank(7, [&] {
      EXPECT_TRUE(at::equal(draw.draw(), expected)) << draw.name;
      EXPECT_TRUE(at::equal(draw.draw(), next)) << draw.name << ", second draw";
    });
    EXPECT_TRUE(at::equal(default_state(), state)) << draw.name << " disturbed the default generator";
  }
}

TEST(OwnGenerator, StreamsOfThreadsDoNotDependOnEachOther) {
  const auto stream = [] {
    std::vector<at::Tensor> drawn;
    for (int i = 0; i < 20; ++i) {
      drawn.push_back(at::randn({10}));
      drawn.push_back(at::dropout(at::ones({10}), 0.5, true));
    }
    return drawn;
  };
  std::vector<at::Tensor> alone[2], together[2];
  for (int id = 0; id < 2; ++id) in_rank(id, [&] { alone[id] = stream(); });
  std::thread first([&] { in_rank(0, [&] { together[0] = stream(); }); });
  std::thread second([&] { in_rank(1, [&] { together[1] = stream(); }); });
  first.join();
  second.join();
  for (int id = 0; id < 2; ++id)
    for (size_t i = 0; i < alone[id].size(); ++i)
      EXPECT_TRUE(at::equal(alone[id][i], together[id][i])) << id << " " << i;
  EXPECT_FALSE(at::equal(alone[0][0], alone[1][0]));
}

TEST(OwnGenerator, SurvivesAnOperatorThatThrows) {
  const at::Tensor state = default_state();
  in_rank(7, [&] {
    EXPECT_ANY_THROW(at::multinomial(at::ones({3}), 20));
    const at::Tensor first = at::randn({10});
    manual_seed(7);
    EXPECT_TRUE(at::equal(first, at::randn({10})));
  });
  EXPECT_TRUE(at::equal(default_state(), state));
}

TEST(OwnGenerator, GivesWayToAGeneratorThatIsPassed) {
  at::Generator passed = at::detail::createCPUGenerator(3);
  const at::Tensor expected = at::randn({10}, passed);
  in_rank(7, [&] {
    at::Generator again = at::detail::createCPUGenerator(3);
    EXPECT_TRUE(at::equal(at::randn({10}, again), expected));
  });
}

TEST(ManualSeed, SeedsTheRankAloneWhereItHasAGenerator) {
  const at::Tensor state = default_state();
  in_rank(7, [] {
    manual_seed(1);
    const at::Tensor first = at::randn({10});
    manual_seed(1);
    EXPECT_TRUE(at::equal(first, at::randn({10})));
    manual_seed(2);
    EXPECT_FALSE(at::equal(first, at::randn({10})));
  });
  EXPECT_TRUE(at::equal(default_state(), state));
}

TEST(ASeed, GivesWhatTheGeneratorGivesUnderItAndLeavesThatAlone) {
  for (const Draw& draw : all_draws()) {
    if (draw.name == "LSTM with dropout") continue;  // two operators that draw: parameters, then dropout
    manual_seed(7);
    const at::Tensor expected = draw.draw();
    manual_seed(1);
    at::randn({3});  // half a pair of normal numbers stays behind
    const at::Tensor state = default_state();
    {
      const testing::DrawBySeeds seeds(7);
      EXPECT_TRUE(at::equal(draw.draw(), expected)) << draw.name;
    }
    EXPECT_TRUE(at::equal(default_state(), state)) << draw.name << " disturbed the default generator";
    in_rank(7, [&] {
      const at::Tensor own = RandomStreams::current().state(RandomStream::kModel, c10::kCPU);
      const testing::DrawBySeeds seeds(7);
      EXPECT_TRUE(at::equal(draw.draw(), expected)) << draw.name << " of a rank with a generator";
      EXPECT_TRUE(at::equal(RandomStreams::current().state(RandomStream::kModel, c10::kCPU), own)) << draw.name;
    });
    EXPECT_TRUE(at::equal(default_state(), state)) << draw.name << " disturbed the default generator";
  }
}

TEST(ASeed, SurvivesAnOperatorThatThrows) {
  const at::Tensor state = default_state();
  const testing::DrawBySeeds seeds(7);
  EXPECT_ANY_THROW(at::multinomial(at::ones({3}), 20));
  EXPECT_TRUE(at::equal(default_state(), state));
}

TEST(ASeed, GivesWayToAGeneratorThatIsPassed) {
  at::Generator passed = at::detail::createCPUGenerator(3);
  const at::Tensor expected = at::randn({10}, passed);
  manual_seed(3);
  const at::Tensor of_default = at::randn({10}, at::detail::getDefaultCPUGenerator());
  manual_seed(3);
  const testing::DrawBySeeds seeds(7);
  at::Generator again = at::detail::createCPUGenerator(3);
  EXPECT_TRUE(at::equal(at::randn({10}, again), expected));
  EXPECT_TRUE(at::equal(at::randn({10}, at::detail::getDefaultCPUGenerator()), of_default));
  EXPECT_FALSE(at::equal(at::randn({10}, at::detail::getDefaultCPUGenerator()), of_default));  // it went on
}

TEST(ASeed, GivesEveryPlaceNumbersOfItsOwnOnKSlice) {
  const auto mask = [](uint64_t place, uint64_t seed) {
    RandomStreams::current().set_slice(place);
    const testing::DrawBySeeds seeds(seed);
    const testing::DrawFromSlice slices;
    return at::dropout(at::ones({100}), 0.5, true);
  };
  in_rank(1, [&] {
    const at::Tensor first = mask(0, 7);
    EXPECT_FALSE(at::equal(mask(1, 7), first));
    EXPECT_FALSE(at::equal(mask(0, 8), first));
    EXPECT_TRUE(at::equal(mask(0, 7), first));
    EXPECT_FALSE(RandomStreams::current().state(RandomStream::kSlice, c10::kCPU).defined());
  });
}

TEST(ASeed, OfAnOperatorThatDrawsNothingSinceItHasNoMemory) {
  const testing::DrawBySeeds seeds(7);
  const at::Tensor x = at::ones({3}, at::kMeta);
  EXPECT_TRUE(at::dropout(x, 0.5, true).is_meta());
  EXPECT_TRUE(at::randn({3}, at::kMeta).is_meta());
}

/// Computes dropout by two of them, of the halves.
class Halves final : public Pass {
 public:
  PassOrder order() const override { return PassOrder::kTensor; }
  void run(OperatorCall& call, Next next) override {
    if (call.op.schema().name() != "aten::dropout") return next(call);
    const at::Tensor x = call.arguments()[0].toTensor();
    const at::Tensor result = next.run(call, [&] {
      const at::Tensor first = at::dropout(x.narrow(0, 0, 50), 0.5, true);
      return at::cat({first, at::dropout(x.narrow(0, 50, 50), 0.5, true)});
    });
    torch::jit::drop(call.stack, call.traits.arguments);
    call.stack.emplace_back(result);
  }

 private:
  const InterceptScope scope_{InterceptScope::Watch::kWrites, this};
};

TEST(ASeed, IsThatOfTheFirstPartThatDrawsAndTheOthersDrawApart) {
  const at::Tensor ones = at::ones({100}), half = at::ones({50});
  manual_seed(7);
  const at::Tensor expected = at::dropout(half, 0.5, true);
  const at::Tensor state = default_state();
  const Halves halves;
  const auto draw = [&] {
    const testing::DrawBySeeds seeds(7);
    return at::dropout(ones, 0.5, true);
  };
  const at::Tensor drawn = draw();
  EXPECT_TRUE(at::equal(drawn.narrow(0, 0, 50), expected));
  EXPECT_FALSE(at::equal(drawn.narrow(0, 50, 50), expected));
  EXPECT_TRUE(at::equal(draw(), drawn));
  EXPECT_TRUE(at::equal(default_state(), state));
}

/// The mask of dropout over 100 elements, drawn from kSlice in place `place`.
at::Tensor slice_mask(uint64_t place) {
  RandomStreams::current().set_slice(place);
  const testing::DrawFromSlice slices;
  return at::dropout(at::ones({100}), 0.5, true);
}

TEST(SliceStream, DiffersFromTheModelsAndByPlace) {
  in_rank(7, [] {
    const at::Tensor first = slice_mask(0), second = slice_mask(1);
    const at::Tensor model = at::dropout(at::ones({100}), 0.5, true);
    EXPECT_FALSE(at::equal(first, second));
    EXPECT_FALSE(at::equal(first, model));
    EXPECT_TRUE(at::equal(slice_mask(0), first));
  });
}

TEST(SliceStream, LeavesTheModelsAlone) {
  const at::Tensor state = default_state();
  in_rank(7, [] {
    const at::Tensor expected = at::randn({10});
    manual_seed(7);
    slice_mask(3);
    EXPECT_TRUE(at::equal(at::randn({10}), expected));
  });
  EXPECT_TRUE(at::equal(default_state(), state));
}

TEST(SliceStream, GoesOnBetweenOperatorsAndBeginsAnewWithASeed) {
  in_rank(7, [] {
    const testing::DrawFromSlice slices;
    const auto draw = [] { return at::dropout(at::ones({100}), 0.5, true); };
    const at::Tensor first = draw(), second = draw();
    EXPECT_FALSE(at::equal(first, second));
    manual_seed(7);
    EXPECT_TRUE(at::equal(draw(), first));
    manual_seed(8);
    EXPECT_FALSE(at::equal(draw(), first));
  });
}

TEST(SliceStream, ServesAThreadWithoutAGeneratorOfItsOwn) {
  manual_seed(7);
  const at::Tensor expected = at::randn({10});
  manual_seed(7);
  const at::Tensor mask = slice_mask(2);
  EXPECT_TRUE(at::equal(at::randn({10}), expected));
  in_rank(7, [&] { EXPECT_TRUE(at::equal(slice_mask(2), mask)); });
}

TEST(RandomStates, BringEveryStreamBack) {
  in_rank(7, [] {
    const testing::DrawFromSlice slices;
    const auto draw = [] { return at::cat({at::randn({10}), at::dropout(at::ones({100}), 0.5, true)}); };
    draw();
    const auto states = random_states(c10::kCPU);
    EXPECT_EQ(states.size(), 2u);
    const at::Tensor expected = draw();
    manual_seed(1);
    set_random_states(states, c10::kCPU);
    EXPECT_TRUE(at::equal(draw(), expected));
    set_random_states({}, c10::kCPU);  // of a checkpoint that another system wrote
    EXPECT_FALSE(at::equal(draw(), expected));
  });
}

TEST(RandomStates, OfAStreamThatWasNotUsedYetLetItBeginAnew) {
  in_rank(7, [] {
    const testing::DrawFromSlice slices;
    const auto draw = [] { return at::dropout(at::ones({100}), 0.5, true); };
    const auto states = random_states(c10::kCPU);
    EXPECT_EQ(states.size(), 1u);
    const at::Tensor expected = draw();
    draw();
    set_random_states(states, c10::kCPU);
    EXPECT_TRUE(at::equal(draw(), expected));
  });
}

TEST(RandomStates, RefuseTextThatIsNone) {
  in_rank(7, [] {
    EXPECT_THROW(set_random_states({{"generator", "12"}}, c10::kCPU), CheckpointError);
    std::string text = random_states(c10::kCPU).at("generator");
    text[5] = 'x';
    EXPECT_THROW(set_random_states({{"slice_generator", text}}, c10::kCPU), CheckpointError);
  });
}

TEST(ManualSeed, SeedsLibtorchWhereTheThreadHasNoGenerator) {
  manual_seed(1);
  const at::Tensor first = at::randn({10});
  manual_seed(1);
  EXPECT_TRUE(at::equal(first, at::randn({10})));
}

}  // namespace
}  // namespace trireme
