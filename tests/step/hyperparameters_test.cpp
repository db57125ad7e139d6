#include "trireme/step/hyperparameters.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using namespace testing;

Hyperparameters falling(size_t groups = 2) {
  return {std::vector<OptimizerOptions>(groups, {.kind = OptimizerKind::kSgd, .lr = 1}),
          {.kind = LrScheduleKind::kLinear, .warmup_num_steps = 0, .total_num_steps = 10}};
}

std::vector<double> rates_of(const Hyperparameters& hyperparameters) {
  std::vector<double> rates;
  for (const OptimizerOptions& group : hyperparameters.groups()) rates.push_back(group.lr);
  return rates;
}

std::vector<double> scheduled(const Hyperparameters& hyperparameters, int64_t steps) {
  return std::vector<double>(2, hyperparameters.schedule().lr(steps));
}

TEST(TheHyperparameters, FollowTheScheduleByAppliedSteps) {
  Hyperparameters hyperparameters = falling();
  EXPECT_EQ(rates_of(hyperparameters), scheduled(hyperparameters, 0));
  hyperparameters.follow(3);
  EXPECT_EQ(rates_of(hyperparameters), scheduled(hyperparameters, 3));
}

TEST(TheHyperparameters, OfAGroupThatWasSetHoldForOneStep) {
  Hyperparameters hyperparameters = falling();
  hyperparameters.set_lr(1, 0.125);
  hyperparameters.follow(1);  // a device has told of a step before it was set
  EXPECT_EQ(rates_of(hyperparameters), (std::vector<double>{scheduled(hyperparameters, 1)[0], 0.125}));
  EXPECT_EQ(hyperparameters.take_given(), (std::vector<bool>{false, true}));
  hyperparameters.follow(1);  // the step that took it was skipped
  EXPECT_EQ(rates_of(hyperparameters)[1], 0.125);
  hyperparameters.follow(2);
  EXPECT_EQ(rates_of(hyperparameters), scheduled(hyperparameters, 2));
}

TEST(TheHyperparameters, OfMuonLeadThoseOfTheParametersThatAdamUpdates) {
  OptimizerOptions muon{.kind = OptimizerKind::kMuon, .lr = 0.02, .beta1 = 0.9}, adam = muon;
  adam.kind = OptimizerKind::kAdamW;
  adam.lr = 0.002;
  Hyperparameters hyperparameters({muon, muon, adam, adam}, {});
  hyperparameters.set_lr(1, 0.01);
  EXPECT_EQ(rates_of(hyperparameters), (std::vector<double>{0.02, 0.01, 0.002, 0.001}));
  EXPECT_EQ(hyperparameters.take_given(), (std::vector<bool>{false, true, false, true}));
  muon.beta1 = 0.8;
  hyperparameters.set(0, muon);
  EXPECT_EQ(hyperparameters.groups()[2].beta1, 0.8);
  EXPECT_EQ(hyperparameters.groups()[2].kind, OptimizerKind::kAdamW);
  hyperparameters.set_lr(3, 0.5);  // by itself
  EXPECT_EQ(rates_of(hyperparameters), (std::vector<double>{0.02, 0.01, 0.002, 0.5}));
}

TEST(TheHyperparameters, ResumeWithTheRatesOfACheckpointOfTheSameGroups) {
  Hyperparameters hyperparameters = falling();
  EXPECT_TRUE(hyperparameters.resume(4, {0.5, 0.25}));
  EXPECT_EQ(rates_of(hyperparameters), (std::vector<double>{0.5, 0.25}));
  (void)hyperparameters.take_given();
  hyperparameters.follow(5);
  EXPECT_EQ(rates_of(hyperparameters), scheduled(hyperparameters, 5));
  EXPECT_FALSE(hyperparameters.resume(2, {0.5}));
  EXPECT_EQ(rates_of(hyperparameters), scheduled(hyperparameters, 2));
}

TEST(TheHyperparameters, OfAGroupThatIsNotThereAreRefusedByName) {
  EXPECT_SAYS(error_of<ConfigError>([] { (void)falling().of(2, "get_lr"); }),
              "get_lr: there is no parameter group 2; use one of the 2, counted from 0");
}

}  // namespace
}  // namespace trireme
