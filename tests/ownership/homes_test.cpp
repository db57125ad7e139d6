// Which stage runs an operator: each rule by itself, with operators as libtorch describes them.
#include "ownership/homes.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ownership/shadow.h"
#include "tests/support/error_of.h"

namespace trireme::ownership {
namespace homes {

using at::Tensor;
using testing::error_of;

/// Decides for each operator that runs, and lets it run.
class Decider final : public Pass {
 public:
  explicit Decider(Homes& homes) : homes_(homes) {}
  PassOrder order() const override { return PassOrder::kOwnership; }
  void run(OperatorCall& call, Next next) override {
    if (is_on && !facts) {  // of the first one
      facts = facts_of(call);
      home = home_of(*facts, homes_.arguments_of(call), entered);
    }
    next(call);
  }
  bool is_on = false;
  std::optional<int> entered;
  std::optional<OperatorFacts> facts;
  std::optional<Home> home;

 private:
  Homes& homes_;
};

/// Parameters `p0` and `p1` and activations `a0`, `a1` of two stages, where a1 was born last, and a replicated tensor.
class AnOperator : public ::testing::Test {
 protected:
  AnOperator() {
    homes.set(p0.storage(), {0, true, 0});
    homes.set(p1.storage(), {1, true, 0});
    homes.set(a0.storage(), {0, false, 5});
    homes.set(a1.storage(), {1, false, 6});
    homes.set(late0.storage(), {0, false, 9});
    homes.set(buffer1.storage(), {1, false, 0});
    homes.set(large0.storage(), {0, false, 4});
  }
  Decider decide(const std::function<void()>& call, std::optional<int> entered = {}) {
    Decider decider(homes);
    decider.entered = entered;
    const InterceptScope scope(InterceptScope::Watch::kWrites, &decider);
    decider.is_on = true;  // the first scope of a process runs an operator of its own
    call();
    return decider;
  }
  std::optional<int> stage(const std::function<void()>& call, std::optional<int> entered = {}) {
    const std::optional<Home> home = decide(call, entered).home;
    return home ? std::optional(home->stage) : std::nullopt;
  }
  OperatorFacts facts(const std::function<void()>& call) { return *decide(call).facts; }

  Homes homes;
  Tensor p0 = at::ones({4, 4}), p1 = at::ones({4, 4}), a0 = at::ones({4, 4}), a1 = at::ones({4, 4});
  Tensor late0 = at::ones({4, 4}), buffer1 = at::ones({4, 4}), large0 = at::ones({3, 4, 4}), nobodys = at::ones({4, 4});
};

TEST_F(AnOperator, ThatWritesRunsWhereTheWrittenTensorIs) {
  EXPECT_EQ(stage([&] { a0.add_(a1); }), 0);
  EXPECT_EQ(stage([&] { a0.mul_(p1); }), 0);
  EXPECT_EQ(stage([&] { at::add_out(a0, a1, p1); }), 0);
}

TEST_F(AnOperator, ThatWritesANormsStatisticsRunsWhereTheyAre) {
  const Tensor x = at::ones({2, 4}), mean = at::zeros({4}), variance = at::ones({4});
  homes.set(x.storage(), {0, false, 8});
  for (const Tensor& statistics : {mean, variance}) homes.set(statistics.storage(), {1, false, 0});
  EXPECT_EQ(stage([&] { at::batch_norm(x, {}, {}, mean, variance, true, 0.1, 1e-5, false); }), 1);
}

TEST_F(AnOperator, ThatWritesTensorsOfTwoStagesIsRefused) {
  EXPECT_SAYS(error_of<Error>([&] {
                Tensor values = at::ones({4}), indices = at::zeros({4}, at::kLong);
                homes.set(values.storage(), {0, false, 1});
                homes.set(indices.storage(), {1, false, 1});
                (void)stage([&] { at::max_out(values, indices, nobodys, 0); });
              }),
              "smp: aten::max.dim_max writes tensors of stage 0 and of stage 1 in one call; write them by a call each");
}

TEST_F(AnOperator, ThatIsElementWiseRunsWhereTheLargerActivationIs) {
  EXPECT_EQ(stage([&] { (void)(large0 * p1); }), 0);
  EXPECT_EQ(stage([&] { (void)(p1 + large0); }), 0);
  EXPECT_EQ(stage([&] { (void)(a0 * p1); }), 1);               // not larger
  EXPECT_EQ(stage([&] { (void)at::matmul(large0, p1); }), 1);  // not by element
}

TEST_F(AnOperator, RunsWhereItsFirstParameterIs) {
  EXPECT_EQ(stage([&] { (void)at::mm(a1, p0); }), 0);
  EXPECT_EQ(stage([&] { (void)at::addmm(p1, late0, p0); }), 1);
  EXPECT_EQ(stage([&] { (void)at::cat({a0, p1, p0}); }), 1);
}

TEST_F(AnOperator, WithoutParametersRunsWhereTheLastBornActivationIs) {
  EXPECT_EQ(stage([&] { (void)(a0 + a1); }), 1);
  EXPECT_EQ(stage([&] { (void)(late0 + a1); }), 0);  // and not on the greatest stage
  const Tensor twin = at::ones({4, 4});
  homes.set(twin.storage(), {1, false, 9});
  EXPECT_EQ(stage([&] { (void)(late0 + twin); }), 1);  // as old: the greater stage
}

TEST_F(AnOperator, OfABufferRunsThereWhereNothingWasBornSince) {
  EXPECT_EQ(stage([&] { (void)(buffer1 * nobodys); }), 1);
  EXPECT_EQ(stage([&] { (void)(buffer1 * a0); }), 0);
}

TEST_F(AnOperator, OfNobodyHasNoHome) {
  EXPECT_EQ(stage([&] { (void)(nobodys * 2); }), std::nullopt);
  EXPECT_EQ(stage([&] { (void)at::ones({2}); }), std::nullopt);
}

TEST_F(AnOperator, OfAModuleOfAStageRunsThereUnlessAParameterOrAWriteSaysElse) {
  EXPECT_EQ(stage([&] { (void)a0.exp(); }, 1), 1);
  EXPECT_EQ(stage([&] { (void)at::mm(a1, p0); }, 1), 0);
  EXPECT_EQ(stage([&] { a0.exp_(); }, 1), 0);
  EXPECT_EQ(stage([&] { (void)nobodys.exp(); }, 1), std::nullopt);
}

TEST_F(AnOperator, ThatGivesAViewRunsWhereItsTensorIs) {
  EXPECT_EQ(stage([&] { (void)a0.t(); }), 0);
  EXPECT_EQ(stage([&] { (void)a0.view_as(a1); }, 1), 0);
  EXPECT_EQ(stage([&] { (void)nobodys.expand_as(a1); }), std::nullopt);
}

TEST_F(AnOperator, OfParametersAloneGivesAParameter) {
  EXPECT_TRUE(decide([&] { (void)(p1 * 0.5); }).home->is_parameter);
  EXPECT_FALSE(decide([&] { (void)(p1 * a0); }).home->is_parameter);
  EXPECT_FALSE(decide([&] { (void)(p1 * nobodys); }).home->is_parameter);
}

TEST_F(AnOperator, ThatCutsAViewByValuesOfAStageIsRefused) {
  const Tensor place = at::zeros({}, at::kLong);
  homes.set(place.storage(), {1, false, 3});
  EXPECT_SAYS(error_of<Error>([&] { (void)stage([&] { (void)at::narrow(a0, 0, place, 2); }); }),
              "smp: aten::narrow.Tensor cuts a view by the values of a tensor of stage 1; read them by tolist() or "
              "item() first");
}

TEST_F(AnOperator, HasTheFactsOfItsSchema) {
  EXPECT_EQ(facts([&] { (void)at::add(a0, a1); }).name, "aten::add.Tensor");
  EXPECT_NE(facts([&] { (void)at::add(a0, a1); }).hash, facts([&] { (void)at::add(a0, 1); }).hash);
  EXPECT_EQ(facts([&] { (void)a0.t(); }).view_of, 0);
  EXPECT_EQ(facts([&] { (void)at::mm(a0, a1); }).view_of, -1);
  const Tensor one = at::ones({});
  EXPECT_TRUE(facts([&] { (void)one.item(); }).gives_values);
  EXPECT_TRUE(facts([&] { (void)at::equal(a0, a1); }).gives_values);
  EXPECT_TRUE(facts([&] { (void)a0.exp(); }).is_each);
  EXPECT_FALSE(facts([&] { (void)a0.sum(); }).is_each);
}

TEST_F(AnOperator, WhoseSizesDependOnValuesTellsThemEachTime) {
  const Tensor mask = a0 > 0, numbers = at::ones({3}, at::kLong), indices = at::zeros({2}, at::kLong);
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { (void)a0.nonzero(); },
           [&] { (void)at::masked_select(a0, mask); },
           [&] { (void)at::where(a0); },
           [&] { (void)at::combinations(numbers); },
           [&] { (void)at::repeat_interleave(numbers); },
           [&] { (void)at::_unique2(a0); },
           [&] { (void)at::bincount(numbers); },
       }) {
    const OperatorFacts of_call = facts(call);
    EXPECT_TRUE(of_call.tells_each || of_call.tells_by_index) << of_call.name;
  }
  EXPECT_TRUE(facts([&] { (void)a0.index({indices}); }).tells_by_index);
  EXPECT_FALSE(facts([&] { (void)a0.index({indices}); }).tells_each);
  EXPECT_FALSE(facts([&] { (void)at::mm(a0, a1); }).tells_each);
}

TEST(HomesOfTensors, AreThoseOfTheirMemory) {
  Homes homes;
  const Tensor tensor = at::ones({4, 4}), other = at::ones({2});
  homes.set(tensor.storage(), {1, true, 7});
  EXPECT_EQ(*homes.find(tensor.t()[1]), (Home{1, true, 7}));
  EXPECT_EQ(homes.find(other), nullptr);
  EXPECT_EQ(homes.find(Tensor()), nullptr);
  const Tensor shadow = make_shadow({.sizes = {2}, .strides = {1}}, c10::kCPU, {0, false, 3});
  EXPECT_EQ(*homes.find(shadow.slice(0, 1)), (Home{0, false, 3}));
}

TEST(HomesOfTensors, AreForgottenWithTheirMemory) {
  Homes homes;
  for (int i = 0; i < 2000; ++i) {
    const Tensor gone = at::ones({64});
    ASSERT_EQ(homes.find(gone), nullptr) << "the home of memory that is gone, of round " << i;
    homes.set(gone.storage(), {1, false, 1});
  }
}

}  // namespace homes
}  // namespace trireme::ownership
