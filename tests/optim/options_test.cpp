#include "trireme/optim/options.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "trireme/base/error.h"
#include "trireme/optim/fields.h"

namespace trireme {
namespace {

const std::vector<ParameterSpec> kParameters = {{.name = "layers.0.weight", .shape = {4, 3}},
                                                {.name = "layers.0.bias", .shape = {4}},
                                                {.name = "norm.weight", .shape = {4}},
                                                {.name = "norm.bias", .shape = {4}}};

TEST(ParameterGroups, WithoutAnyAllParametersAreInGroupZero) {
  const OptimizerOptions options{.lr = 0.5};
  const GroupedParameters grouped = group_parameters(options, {}, kParameters);
  EXPECT_EQ(grouped.options, std::vector{options});
  EXPECT_EQ(grouped.group_of, (std::vector<int>{0, 0, 0, 0}));
}

TEST(ParameterGroups, AParameterBelongsToTheFirstGroupThatMatchesItAndTheRestToGroupZero) {
  const OptimizerOptions options{.lr = 0.5, .weight_decay = 0.1};
  const GroupedParameters grouped = group_parameters(
      options, {{.patterns = {"^norm", "nothing"}, .lr = 0.25}, {.patterns = {"bias$"}, .weight_decay = 0.0}},
      kParameters);
  EXPECT_EQ(grouped.group_of, (std::vector<int>{0, 2, 1, 1}));
  ASSERT_EQ(grouped.options.size(), 3);
  EXPECT_EQ(grouped.options[0], options);
  EXPECT_EQ(grouped.options[1], (OptimizerOptions{.lr = 0.25, .weight_decay = 0.1}));
  EXPECT_EQ(grouped.options[2], (OptimizerOptions{.lr = 0.5, .weight_decay = 0}));
}

TEST(ParameterGroups, TakeParametersByTheirWholeNamesBesidePatterns) {
  const GroupedParameters grouped = group_parameters(
      {}, {{.patterns = {"^layers.*bias"}, .names = {"norm.weight"}}, {.names = {"norm", "norm.bias"}}}, kParameters);
  EXPECT_EQ(grouped.group_of, (std::vector<int>{0, 1, 1, 2}));
}

TEST(ParameterGroups, OverrideEveryHyperparameter) {
  const GroupedParameters grouped = group_parameters(
      {},
      {{.patterns = {"."}, .lr = 0.1, .beta1 = 0.2, .beta2 = 0.3, .eps = 0.4, .weight_decay = 0.5, .momentum = 0.6}},
      kParameters);
  EXPECT_EQ(
      grouped.options[1],
      (OptimizerOptions{.lr = 0.1, .beta1 = 0.2, .beta2 = 0.3, .eps = 0.4, .weight_decay = 0.5, .momentum = 0.6}));
}

TEST(ParameterGroups, OfMuonLeaveAllButMatricesToAdam) {
  const std::vector<ParameterSpec> parameters = {
      {.name = "embed.weight", .shape = {9, 4}}, {.name = "layers.0.weight", .shape = {4, 3}},
      {.name = "layers.0.bias", .shape = {4}},   {.name = "layers.1.weight", .shape = {4, 3}},
      {.name = "layers.1.bias", .shape = {4}},   {.name = "lm_head.weight", .shape = {9, 4}}};
  const OptimizerOptions muon{.kind = OptimizerKind::kMuon, .lr = 0.5, .momentum = 0.9, .adam_lr = 0.25};
  const GroupedParameters grouped = group_parameters(muon, {{.patterns = {"layers.1"}, .lr = 0.125}}, parameters);
  EXPECT_EQ(grouped.group_of, (std::vector<int>{2, 0, 2, 1, 3, 2}));
  ASSERT_EQ(grouped.options.size(), 4);
  EXPECT_EQ(grouped.options[0], muon);
  EXPECT_EQ(grouped.options[1].lr, 0.125);
  EXPECT_EQ(grouped.options[2].kind, OptimizerKind::kAdamW);
  EXPECT_EQ(grouped.options[2].lr, 0.25);
  EXPECT_EQ(grouped.options[3].kind, OptimizerKind::kAdamW);
  EXPECT_EQ(grouped.options[3].lr, 0.125);  // a group's own lr holds for both
}

std::string refusal_of(const ParameterGroup& group) {
  try {
    group_parameters({}, {{.patterns = {"^norm"}}, group}, kParameters);
  } catch (const ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return "";
}

TEST(ParameterGroups, RefuseByNameWhatCannotBeMeant) {
  EXPECT_EQ(refusal_of({.patterns = {"nrom"}}),
            "parameter_groups[1]: no parameter is left that its patterns match or its names name; correct them, or "
            "remove the group");
  EXPECT_EQ(refusal_of({.patterns = {"norm.bias"}}),  // the first group has it
            "parameter_groups[1]: no parameter is left that its patterns match or its names name; correct them, or "
            "remove the group");
  EXPECT_EQ(refusal_of({.patterns = {"("}}).rfind("parameter_groups[1].patterns: '(' is no regular expression", 0), 0);
  EXPECT_EQ(refusal_of({.patterns = {"bias"}, .lr = -1.0}),
            "parameter_groups[1]: optimizer.params.lr=-1: use 0 or more");
}

TEST(Fields, AreAllMembersButTheKindAndTheLearningRateOfMuonsAdam) {
  OptimizerOptions options;
  // A member more does not compile here: give it a row in fields(), and a name in this list.
  const auto& [kind, lr, beta1, beta2, eps, weight_decay, momentum, nesterov, min_coeff, max_coeff, bias_correction,
               ns_steps, adam_lr] = options;
  const std::set<const void*> members = {&lr,           &beta1,           &beta2,    &eps,
                                         &weight_decay, &momentum,        &nesterov, &min_coeff,
                                         &max_coeff,    &bias_correction, &ns_steps};
  std::set<const void*> visited;
  fields([&](const Field&, auto own, auto) { visited.insert(&(options.*own)); });
  EXPECT_EQ(visited, members);
  EXPECT_EQ(kind, OptimizerKind::kAdamW);
  EXPECT_EQ(adam_lr, std::nullopt);
}

TEST(Fields, OfGroupsAreAllMembersOfAGroup) {
  ParameterGroup group;
  const auto& [patterns, names, lr, beta1, beta2, eps, weight_decay, momentum, nesterov] = group;
  const std::set<const void*> members = {&lr, &beta1, &beta2, &eps, &weight_decay, &momentum, &nesterov};
  std::set<const void*> visited;
  group_fields([&](const Field&, auto, auto of_group) { visited.insert(&(group.*of_group)); });
  EXPECT_EQ(visited, members);
  EXPECT_TRUE(patterns.empty() && names.empty());
}

TEST(Fields, AreWhatEachOptimizerHas) {
  std::map<std::string, std::set<OptimizerKind>> has;
  fields([&](const Field& field, auto, auto) {
    for (const OptimizerKind kind :
         {OptimizerKind::kAdamW, OptimizerKind::kLion, OptimizerKind::kMuon, OptimizerKind::kSgd})
      if (field.is_of(kind)) has[field.name].insert(kind);
  });
  EXPECT_EQ(has["betas"], (std::set{OptimizerKind::kAdamW, OptimizerKind::kLion}));
  EXPECT_EQ(has["eps"], (std::set{OptimizerKind::kAdamW}));
  EXPECT_EQ(has["momentum"], (std::set{OptimizerKind::kMuon, OptimizerKind::kSgd}));
  EXPECT_EQ(has["nesterov"], (std::set{OptimizerKind::kSgd}));
}

TEST(Momentum, OfAScheduleReachesOnlyOptimizersThatHaveOne) {
  OptimizerOptions adam, sgd{.kind = OptimizerKind::kSgd}, heavy{.kind = OptimizerKind::kSgd, .momentum = 0.9};
  for (OptimizerOptions* options : {&adam, &sgd, &heavy}) set_momentum(*options, {0.5, 0.25});
  EXPECT_EQ(adam.beta1, 0.5);
  EXPECT_EQ(adam.beta2, 0.25);
  EXPECT_EQ(sgd.momentum, 0);
  EXPECT_EQ(heavy.momentum, 0.5);
}

}  // namespace
}  // namespace trireme
