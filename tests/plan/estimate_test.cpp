#include "trireme/plan/estimate.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "trireme/base/error.h"

namespace trireme {
namespace {

int64_t total(int64_t parameters, const EstimateOptions& options) {
  return estimate_model_states(parameters, options).total();
}

constexpr int64_t kParameters = 64'000;  // divides over 64 ranks
constexpr int64_t kWorld = 64;

TEST(Estimate, Bf16AccumulationTakesZerosClosedForms) {
  const auto bytes = [](int stage) {
    return total(kParameters, {.stage = stage, .world = kWorld, .accumulation_dtype = at::kBFloat16, .optimizer = {}});
  };
  EXPECT_EQ(bytes(0), 16 * kParameters);
  EXPECT_EQ(bytes(1), 4 * kParameters + 12 * kParameters / kWorld);
  EXPECT_EQ(bytes(2), 2 * kParameters + 14 * kParameters / kWorld);
  EXPECT_EQ(bytes(3), 16 * kParameters / kWorld);
}

TEST(Estimate, Fp32AccumulationAddsTwoBytesWhereGradientsAreHeld) {
  const auto extra = [](int stage) {
    EstimateOptions options{.stage = stage, .world = kWorld, .optimizer = {}};
    const int64_t wide = total(kParameters, options);
    options.accumulation_dtype = at::kBFloat16;
    return wide - total(kParameters, options);
  };
  EXPECT_EQ(extra(0), 2 * kParameters);
  EXPECT_EQ(extra(1), 2 * kParameters);
  EXPECT_EQ(extra(2), 2 * kParameters / kWorld);
  EXPECT_EQ(extra(3), 2 * kParameters / kWorld);
}

TEST(Estimate, Fp32TrainingHasNoMasters) {
  const EstimateOptions options{.world = kWorld, .weight_dtype = at::kFloat, .optimizer = {}};
  EXPECT_EQ(estimate_model_states(100, options), (ModelStates{.weight_bytes = 400,
                                                              .gradient_bytes = 400,
                                                              .master_bytes = 0,
                                                              .optimizer_bytes = 800,
                                                              .snapshot_bytes = 12 * ((100 + kWorld - 1) / kWorld)}));
}

TEST(Estimate, ASnapshotIsARanksShareOfWhatIsSavedAtEveryStage) {
  for (int stage = 0; stage < 4; ++stage) {
    const EstimateOptions options{.stage = stage, .world = 4, .optimizer = {}};
    EXPECT_EQ(estimate_model_states(1000, options).snapshot_bytes, 250 * (2 + 4 + 8)) << "stage " << stage;
  }
}

TEST(Estimate, OneRankHoldsTheSameAtEveryStage) {
  for (int stage = 0; stage < 4; ++stage) EXPECT_EQ(total(1001, {.stage = stage, .optimizer = {}}), 18 * 1001);
}

TEST(Estimate, RoundsAShardUp) {
  // 7 parameters over 4 ranks: 2 each, the last one fewer.
  EXPECT_EQ(total(7, {.stage = 3, .world = 4, .accumulation_dtype = at::kBFloat16, .optimizer = {}}), 2 * 16);
}

TEST(Estimate, SgdHoldsAMomentumOnlyWhereItHasOne) {
  EstimateOptions options{.optimizer = {.kind = OptimizerKind::kSgd}};
  EXPECT_EQ(estimate_model_states(100, options).optimizer_bytes, 0);
  options.optimizer.momentum = 0.9;
  EXPECT_EQ(estimate_model_states(100, options).optimizer_bytes, 400);
}

TEST(Estimate, RefusesWhatCannotBe) {
  EXPECT_THROW(estimate_model_states(1, {.stage = 4, .optimizer = {}}), ConfigError);
  EXPECT_THROW(estimate_model_states(1, {.world = 0, .optimizer = {}}), ConfigError);
  EXPECT_THROW(estimate_model_states(-1, {.optimizer = {}}), ConfigError);
  EXPECT_THROW(estimate_model_states(1, {.optimizer = {}, .offload_ratio = 1.5}), ConfigError);
}

TEST(Estimate, OfALayoutCountsPaddingOnTrainableAndFrozenUnits) {
  // Two units of one parameter each; only kAlignment elements per shard are enough for 3 and 40 elements on 2 ranks.
  const std::vector<ParameterSpec> parameters = {
      {.name = "a", .shape = {3}, .dtype = at::kBFloat16, .trainable = true},
      {.name = "b", .shape = {8, 5}, .dtype = at::kFloat, .trainable = false}};
  const Layout layout = make_layout(parameters, 2);
  ASSERT_EQ(layout.units.size(), 2u);
  EXPECT_EQ(estimate_model_states(layout, {.stage = 3, .world = 2, .optimizer = {}}),
            (ModelStates{.weight_bytes = kAlignment * 2 + kAlignment * 4,
                         .gradient_bytes = kAlignment * 4,
                         .master_bytes = kAlignment * 4,
                         .optimizer_bytes = kAlignment * 8,
                         .snapshot_bytes = kAlignment * (2 + 4 + 8) + kAlignment * 4}));
  EXPECT_EQ(estimate_model_states(layout, {.stage = 2, .world = 2, .optimizer = {}}).weight_bytes,
            2 * kAlignment * 2 + 2 * kAlignment * 4);
}

TEST(Estimate, OfALayoutWithoutPaddingIsTheClosedForm) {
  const std::vector<ParameterSpec> parameters = {
      {.name = "w", .shape = {64, kAlignment}, .dtype = at::kBFloat16, .trainable = true}};
  for (int stage = 0; stage < 4; ++stage) {
    const EstimateOptions options{.stage = stage, .world = 8, .optimizer = {}};
    EXPECT_EQ(estimate_model_states(make_layout(parameters, 8), options),
              estimate_model_states(64 * kAlignment, options));
  }
}

TEST(Estimate, OfWhatIsOffloadedLeavesWeightsToTheDevice) {
  for (const int stage : {1, 2, 3}) {
    EstimateOptions options{.stage = stage, .world = 4, .optimizer = {}, .offload_ratio = 1};
    const int64_t weights = stage == 3 ? 500 : 2000;
    EXPECT_EQ(estimate_model_states(1000, options),
              (ModelStates{.weight_bytes = weights, .host_bytes = 250 * 18, .snapshot_bytes = 250 * 14}));
    options.offload_parameters = true;
    EXPECT_EQ(estimate_model_states(1000, options).weight_bytes, stage == 3 ? 0 : weights);
    EXPECT_EQ(estimate_model_states(1000, options).host_bytes, 250 * 18);
  }
  const EstimateOptions at_stage_0{.optimizer = {}, .offload_ratio = 1, .offload_parameters = true};
  EXPECT_EQ(estimate_model_states(1000, at_stage_0), estimate_model_states(1000, {.optimizer = {}}));
}

TEST(Estimate, OfWhatIsOnDiskLeavesGradientsAndWeightsInMemory) {
  for (const int stage : {0, 1, 2, 3}) {
    EstimateOptions options{.stage = stage, .world = 4, .optimizer = {}, .on_disk = KeptOnDisk::kStates};
    const int64_t states = (stage == 0 ? 1000 : 250) * 12, weights = (stage == 3 ? 250 : 1000) * 2;
    const int64_t gradients = (stage < 2 ? 1000 : 250) * 4;
    EXPECT_EQ(
        estimate_model_states(1000, options),
        (ModelStates{
            .weight_bytes = weights, .gradient_bytes = gradients, .disk_bytes = states, .snapshot_bytes = 250 * 14}));
    options.on_disk = KeptOnDisk::kStatesAndWeights;
    const bool moves = stage == 3;
    EXPECT_EQ(estimate_model_states(1000, options), (ModelStates{.weight_bytes = moves ? 0 : weights,
                                                                 .gradient_bytes = gradients,
                                                                 .disk_bytes = states + (moves ? weights : 0),
                                                                 .snapshot_bytes = 250 * 14}));
  }
  const EstimateOptions both{.stage = 1, .optimizer = {}, .offload_ratio = 1, .on_disk = KeptOnDisk::kStates};
  EXPECT_THROW(estimate_model_states(1000, both), ConfigError);
}

TEST(EstimateTable, HasAColumnForWhatIsOnDisk) {
  const EstimateRequest request{
      .worlds = {1}, .accumulation_dtypes = {at::kFloat}, .on_disk = KeptOnDisk::kStatesAndWeights};
  const std::string text = to_table(estimate(8'000'000'000, request));
  EXPECT_NE(text.find("stage 3      disk\n     1          fp32        48        48        48        32       112\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("\"disk\" is on disk at stage 3; the rest is left in memory."), std::string::npos) << text;
}

TEST(Estimate, OfAPartThatIsOffloadedIsASumOfBoth) {
  for (const int stage : {1, 2}) {
    const EstimateOptions options{.stage = stage, .world = 2, .optimizer = {}, .offload_ratio = 0.25};
    EXPECT_EQ(estimate_model_states(1000, options), (ModelStates{.weight_bytes = 2000,
                                                                 .gradient_bytes = 375 * 4,
                                                                 .master_bytes = 375 * 4,
                                                                 .optimizer_bytes = 375 * 8,
                                                                 .host_bytes = 125 * 18,
                                                                 .snapshot_bytes = 500 * 14}));
  }
}

TEST(Estimate, OffloadsTheLastUnitsOfALayoutAndFrozenShards) {
  std::vector<ParameterSpec> parameters;
  for (const char* name : {"a.weight", "b.weight", "frozen.weight"})
    parameters.push_back({.name = name, .shape = {kAlignment}, .dtype = at::kBFloat16, .trainable = name[0] != 'f'});
  const Layout layout = make_layout(parameters, 1, {.merge_below_bytes = 0});
  ASSERT_EQ(layout.units.size(), 3u);
  const EstimateOptions half{.stage = 3, .optimizer = {}, .offload_ratio = 0.4};
  EXPECT_EQ(offloaded_units(layout, 0.4), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(estimate_model_states(layout, half).host_bytes, kAlignment * 18);
  EXPECT_EQ(estimate_model_states(layout, half).weight_bytes, 3 * kAlignment * 2);
  EstimateOptions parameters_too = half;
  parameters_too.offload_parameters = true;
  EXPECT_EQ(estimate_model_states(layout, parameters_too).host_bytes, kAlignment * (18 + 2));
  EXPECT_EQ(estimate_model_states(layout, parameters_too).weight_bytes, kAlignment * 2);
}

TEST(EstimateTable, HasAColumnForWhatIsOffloaded) {
  EXPECT_EQ(to_table(estimate(1'000'000'000, {.worlds = {2},
                                              .accumulation_dtypes = {at::kFloat},
                                              .optimizer = {},
                                              .offload_ratio = 0.5,
                                              .offload_parameters = true})),
            "1 B parameters, bf16 weights, AdamW: model states per rank in GB\n"
            "\n"
            " ranks  accumulation   stage 0   stage 1   stage 2   stage 3      host\n"
            "     2          fp32        18         6         6       4.5       4.5\n"
            "\n"
            "With offload_optimizer (ratio 0.5) and, at stage 3, offload_param: \"host\" is in the host's memory, from "
            "stage 1 on; the rest is left on the device.\n"
            "\n"
            "With checkpoint.async_save each rank holds a snapshot besides: 14 GB / ranks.\n");
}

TEST(EstimateTable, PrintsThePapersFigures) {
  // ZeRO, arXiv:1910.02054, figure 1: 7.5 B parameters on 64 ranks.
  EXPECT_EQ(to_table(estimate(7'500'000'000, {.worlds = {64}, .optimizer = {}})),
            "7.5 B parameters, bf16 weights, AdamW: model states per rank in GB\n"
            "\n"
            " ranks  accumulation   stage 0   stage 1   stage 2   stage 3\n"
            "    64          fp32       135      46.4      16.9       2.1\n"
            "    64          bf16       120      31.4      16.6       1.9\n"
            "\n"
            "With checkpoint.async_save each rank holds a snapshot besides: 105 GB / ranks.\n");
}

TEST(EstimateTable, ChoosesTheUnitByTheLargestFigure) {
  const std::string table =
      to_table(estimate(2'500'000, {.worlds = {1, 4}, .weight_dtype = at::kFloat, .optimizer = {}}));
  EXPECT_EQ(table,
            "2.5 M parameters, fp32 weights, AdamW: model states per rank in MB\n"
            "\n"
            " ranks  accumulation   stage 0   stage 1   stage 2   stage 3\n"
            "     1          fp32        40        40        40        40\n"
            "     4          fp32        40        25      17.5        10\n"
            "\n"
            "With checkpoint.async_save each rank holds a snapshot besides: 30 MB / ranks.\n");
}

TEST(EstimateTable, OfAModelUsesItsOwnParameters) {
  const std::vector<ParameterSpec> parameters = {
      {.name = "w", .shape = {1000, 1000}, .dtype = at::kFloat, .trainable = true}};
  const Estimate result = estimate(parameters, {.worlds = {1}, .weight_dtype = at::kFloat, .optimizer = {}});
  EXPECT_EQ(result.parameters, 1'000'000);
  EXPECT_EQ(result.rows.at(0).by_stage.at(0).total(), 16'000'000);
}

TEST(EstimateTable, GivesBytesAsJson) {
  const Json json = to_json(estimate(100, {.worlds = {2}, .accumulation_dtypes = {at::kBFloat16}, .optimizer = {}}));
  EXPECT_EQ(json["parameters"], 100);
  ASSERT_EQ(json["per_rank"].size(), 4u);
  EXPECT_EQ(
      json["per_rank"][1].dump(),
      R"({"world":2,"accumulation_dtype":"bf16","stage":1,"weight_bytes":200,"gradient_bytes":200,)"
      R"("master_bytes":200,"optimizer_bytes":400,"total_bytes":1000,"host_bytes":0,"disk_bytes":0,"async_save_snapshot_bytes":700})");
}

}  // namespace
}  // namespace trireme
