#include "trireme/checkpoint/training_values.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/fixture.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using testing::named_error_of;

// All in one text, as version 1 has it and as other layouts give it.
constexpr const char* kJoined =
    R"({"global_steps":4,"micro_steps":8,"skipped_steps":1,"global_samples":16,"lr":0.5,"group_lrs":[0.5,0.25],)"
    R"("loss_scaler":{"scale":8.0,"steps":4,"last_overflow":2,"hysteresis":1},"aliases":{"head":"embed"},)"
    R"("exclude_frozen_parameters":false,"parameter_steps":{"embed":3,"out":2,"frozen":0},)"
    R"("parameter_groups":[{"eps":1e-08,"names":["out","embed"]},{"eps":0.5}],"config":{"a":1},"client_state":{"b":2},)"
    R"("of_another_system":[3]})";

TEST(TrainingValues, ComeBackAsTheyWereWritten) {
  const TrainingValues values = parse_training_values(kJoined);
  EXPECT_EQ(to_text(values), kJoined);
  EXPECT_EQ(values.global_steps, 4);
  EXPECT_EQ(values.loss_scaler->last_overflow, 2);
  EXPECT_EQ(values.steps.at("out"), 2);
  EXPECT_EQ(values.groups[0].names, (std::vector<std::string>{"out", "embed"}));
  EXPECT_EQ(values.others, R"({"of_another_system":[3]})");
  EXPECT_EQ(to_text(parse_training_values("{}")), "{}");
}

TEST(TrainingValues, OfTensorsComeBeforeThoseThatAreShared) {
  const std::string shared = R"({"parameter_steps":{"embed":7},"parameter_groups":[{"eps":1e-08},{"eps":0.5}]})";
  const TrainingValues values = parse_training_values(
      shared, {{"model.embed", to_text(ParameterValues{.steps = 3, .group = 0, .position = 1, .aliases = {"head"}})},
               {"model.out", to_text(ParameterValues{.steps = 2, .group = 0, .position = 0})},
               {"model.frozen", to_text(ParameterValues{.steps = 0})},
               {"optimizer.exp_avg.embed", R"({"steps":9})"}});
  EXPECT_EQ(values.steps, (std::map<std::string, int64_t>{{"embed", 3}, {"out", 2}, {"frozen", 0}}));
  EXPECT_EQ(values.parameters, (std::vector<std::string>{"embed", "out", "frozen"}));
  EXPECT_EQ(values.aliases, (std::map<std::string, std::string>{{"head", "embed"}}));
  EXPECT_EQ(values.groups[0].names, (std::vector<std::string>{"out", "embed"}));
  EXPECT_TRUE(values.groups[1].names.empty());
}

TEST(TrainingValues, OfTheWrongKindAreRefused) {
  for (const char* text : {R"({"global_steps":"four"})", R"({"parameter_groups":3})", R"({"loss_scaler":{}})"})
    EXPECT_NE(named_error_of([&] { (void)parse_training_values(text); }).find("a value is of the wrong kind"),
              std::string::npos)
        << text;
  EXPECT_EQ(named_error_of([] {
              (void)parse_training_values("{}", {{"model.w", R"({"group":1})"}});
            }),
            "CheckpointError: checkpoint: \"w\" is of parameter group 1, expected one of 0");
}

}  // namespace
}  // namespace trireme
