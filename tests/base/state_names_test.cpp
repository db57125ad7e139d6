#include "trireme/base/state_names.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

TEST(StateNames, ComeApartAsTheyWerePutTogether) {
  EXPECT_EQ(weight_name("a.b"), "model.a.b");
  EXPECT_EQ(master_name("a.b"), "master.a.b");
  EXPECT_EQ(optimizer_state_name("exp_avg", "a.b"), "optimizer.exp_avg.a.b");
  const auto expect = [](const std::string& name, StateKind kind, const char* parameter, const char* state) {
    const StateName parsed = parse_state_name(name);
    EXPECT_EQ(parsed.kind, kind) << name;
    EXPECT_EQ(parsed.parameter, parameter) << name;
    EXPECT_EQ(parsed.state, state) << name;
  };
  expect("model.a.b", StateKind::kWeight, "a.b", "");
  expect("master.a.b", StateKind::kMaster, "a.b", "");
  expect("optimizer.exp_avg.a.b", StateKind::kOptimizerState, "a.b", "exp_avg");
  expect("optimizer.exp_avg", StateKind::kOther, "", "");
  expect("modela", StateKind::kOther, "", "");
}

}  // namespace
}  // namespace trireme
