#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "tests/config/config_test_support.h"
#include "tests/support/captured_log.h"

namespace trireme {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

PagerPolicy zero(const std::string& keys) { return read_with("\"zero_optimization\": {" + keys + "}").pager; }
Refusal zero_refusal(const std::string& keys) { return refusal_of("\"zero_optimization\": {" + keys + "}"); }
std::string zero_log(const std::string& keys) {
  CapturedLog log;
  zero(keys);
  return log.text();
}

TEST(Zero, IsStageZeroByDefault) {
  EXPECT_EQ(read_with("\"steps_per_print\": 1").pager.stage, 0);
  EXPECT_EQ(zero("").stage, 0);
  EXPECT_EQ(zero("\"stage\": \"auto\"").stage, 0);
}

TEST(Zero, ReadsTheFourStages) {
  for (int stage = 0; stage <= 3; ++stage) EXPECT_EQ(zero("\"stage\": " + std::to_string(stage)).stage, stage);
  EXPECT_EQ(zero_refusal("\"stage\": 4"), wrong("`zero_optimization.stage` is 4; expected an integer from 0 to 3"));
  EXPECT_EQ(zero_refusal("\"stage\": \"3\""),
            wrong("`zero_optimization.stage` is \"3\"; expected an integer from 0 to 3; write it without quotes"));
  EXPECT_EQ(zero_refusal("\"stage\": true"),
            wrong("`zero_optimization.stage` is true; expected an integer from 0 to 3"));
}

TEST(Zero, ReadsTrueAsStageOneWithAWarning) {
  CapturedLog log;
  EXPECT_EQ(read_with("\"zero_optimization\": true").pager.stage, 1);
  EXPECT_EQ(log.text(), "warning <string>: `zero_optimization` = true is deprecated; write {\"stage\": 1}\n");
  EXPECT_EQ(read_with("\"zero_optimization\": false").pager.stage, 0);
}

TEST(Zero, RefusesAnythingElseInPlaceOfTheSection) {
  EXPECT_EQ(refusal_of("\"zero_optimization\": 3"), wrong("`zero_optimization` is 3; expected an object { … }"));
}

TEST(Zero, TurnsElementsIntoBytesOfTheWeights) {
  const std::string keys = R"("stage": 3, "stage3_max_live_parameters": 1000, "stage3_prefetch_bucket_size": 1e2)";
  EXPECT_EQ(zero(keys).live_bytes, 4000);
  EXPECT_EQ(zero(keys).prefetch_bytes, 400);
  const auto bf16 = read_with("\"bf16\": {\"enabled\": true}, \"zero_optimization\": {" + keys + "}").pager;
  EXPECT_EQ(bf16.live_bytes, 2000);
  EXPECT_EQ(bf16.prefetch_bytes, 200);
}

TEST(Zero, HasDeepSpeedsBudgetsByDefault) {
  EXPECT_EQ(zero("").live_bytes, 4'000'000'000);    // 1e9 elements of fp32
  EXPECT_EQ(zero("").prefetch_bytes, 200'000'000);  // 5e7
}

TEST(Zero, SaturatesABudgetThatIsTooLargeToCount) {
  EXPECT_EQ(zero("\"stage3_max_live_parameters\": 9223372036854775807").live_bytes, kUnlimited);
  EXPECT_EQ(zero("\"stage3_max_live_parameters\": 1e999").live_bytes, kUnlimited);
}

TEST(Zero, TakesStageThreeKeysWithoutTheirPrefix) {
  EXPECT_EQ(zero("\"max_live_parameters\": 1000, \"prefetch_bucket_size\": 10").live_bytes, 4000);
  EXPECT_EQ(zero("\"max_live_parameters\": 1000, \"prefetch_bucket_size\": 10").prefetch_bytes, 40);
  EXPECT_EQ(zero_refusal("\"max_live_parameters\": -1"),
            wrong("`zero_optimization.max_live_parameters` is -1; expected an integer >= 0"));
}

TEST(Zero, RefusesTwoSpellingsOfOneKey) {
  EXPECT_EQ(zero_refusal("\"max_live_parameters\": 1, \"stage3_max_live_parameters\": 1"),
            wrong("`zero_optimization.max_live_parameters` and `zero_optimization.stage3_max_live_parameters` are two "
                  "spellings of one key; keep `zero_optimization.stage3_max_live_parameters`"));
}

TEST(Zero, RefusesABudgetInElementsAndInBytes) {
  EXPECT_EQ(
      refusal_of(R"("zero_optimization": {"max_live_parameters": 5}, "trireme": {"live_bytes": 5})"),
      wrong("`zero_optimization.max_live_parameters` and `trireme.live_bytes` are the same budget in elements and in "
            "bytes; keep one of the two"));
}

TEST(Zero, NamesKeysWithoutMeaningInOneInfoLine) {
  EXPECT_EQ(
      zero_log(
          R"("stage": 2, "load_from_fp32_weights": false, "reduce_bucket_size": 4e8, "param_persistence_threshold": 10)"),
      "info <string>: ignored, because Trireme does not need them (`trireme docs config` says why): "
      "`zero_optimization.reduce_bucket_size`, "
      "`zero_optimization.load_from_fp32_weights`, `zero_optimization.param_persistence_threshold`\n");
  EXPECT_EQ(zero_log(R"("stage": 3, "reduce_bucket_size": "auto")"), "");
}

TEST(Zero, NamesNoKeyThatHasTheValueOfDeepSpeedsTemplates) {
  EXPECT_EQ(zero_log(R"("stage": 3, "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": 5e8,
                        "sub_group_size": 1e9, "allgather_partitions": true, "allgather_bucket_size": 2e8,
                        "reduce_scatter": true, "round_robin_gradients": true,
                        "offload_optimizer": {"device": "cpu", "pin_memory": true})"),
            "");
}

TEST(Zero, ChecksTheTypeOfKeysWithoutMeaning) {
  EXPECT_EQ(zero_refusal("\"overlap_comm\": 2"),
            wrong("`zero_optimization.overlap_comm` is 2; expected true or false"));
  EXPECT_EQ(zero_refusal("\"reduce_bucket_size\": -1"),
            wrong("`zero_optimization.reduce_bucket_size` is -1; expected a number >= 0"));
  EXPECT_EQ(zero_refusal("\"allgather_bucket_size\": 3"),
            wrong("`zero_optimization.allgather_bucket_size` is 3; expected an even integer"));
}

TEST(Zero, RefusesWhatIsNotThereYet) {
  EXPECT_EQ(
      zero_refusal("\"zero_quantized_weights\": true"),
      not_there("`zero_optimization.zero_quantized_weights` = true is not there yet; remove it or set it to false"));
  EXPECT_EQ(zero_refusal("\"zenflow\": {}"), not_there("`zero_optimization.zenflow` = {} is not there yet; remove it"));
}

TEST(Zero, AcceptsThemSwitchedOffOrAtTheirDefault) {
  EXPECT_EQ(zero_log(R"("stage": 3, "offload_param": null, "zero_quantized_weights": false, "mics_shard_size": -1,
                       "zero_hpz_partition_size": 1, "elastic_checkpoint": false)"),
            "");
}

TEST(Zero, ReadsStatesOnDisk) {
  const auto read = [](const std::string& section, int stage) {
    return parse_config(str(R"({"train_batch_size": 1, "zero_optimization": {"stage": )", stage,
                            R"(, "offload_optimizer": {)", section, "}}}"),
                        1);
  };
  for (const int stage : {0, 3}) {
    const Config config = read(R"("device": "nvme", "nvme_path": "/nvme/states", "buffer_count": 6)", stage);
    EXPECT_EQ(config.disk, (DiskSpace{.folder = "/nvme/states", .buffers = 6}));
    EXPECT_EQ(config.pager.offload_ratio, stage == 3 ? 1 : 0);
    EXPECT_EQ(config_from_json(to_json(config), 1), config);
  }
  EXPECT_FALSE(read(R"("device": "cpu", "nvme_path": "/nvme/states")", 1).disk.is_on());
  EXPECT_EQ(zero_refusal(R"("offload_optimizer": {"device": "nvme"})"),
            wrong("`zero_optimization.offload_optimizer.nvme_path` is missing; set it to a folder of the disk, or the "
                  "device to \"cpu\""));
  EXPECT_EQ(zero_refusal(R"("offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 1})"),
            wrong("`zero_optimization.offload_optimizer.buffer_count` is 1; expected an integer from 2 to 1024"));
}

TEST(Zero, ReadsWeightsOnDisk) {
  const auto read = [](const std::string& section) {
    return parse_config(
        str(R"({"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": {)", section, "}}}"), 1);
  };
  const Config config = read(R"("device": "nvme", "nvme_path": "/nvme/weights", "buffer_count": 6, "max_in_cpu": 7)");
  EXPECT_EQ(config.pager.disk, (DiskSpace{.folder = "/nvme/weights", .buffers = 6}));
  EXPECT_FALSE(config.pager.offload_parameters);
  EXPECT_FALSE(config.disk.is_on());
  EXPECT_EQ(config_from_json(to_json(config), 1), config);
  EXPECT_FALSE(read(R"("device": "cpu", "nvme_path": "/nvme/weights")").pager.disk.is_on());
  EXPECT_EQ(zero_refusal(R"("stage": 3, "offload_param": {"device": "nvme"})"),
            wrong("`zero_optimization.offload_param.nvme_path` is missing; set it to a folder of the disk, or the "
                  "device to \"cpu\""));
  EXPECT_EQ(
      zero_refusal(R"("stage": 3, "offload_param": {"device": "nvme", "nvme_path": "~/weights"})"),
      wrong("`zero_optimization.offload_param.nvme_path` = \"~/weights\" is no path: only a shell knows \"~\"; write "
            "it in full"));
  EXPECT_EQ(zero_refusal(R"("stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/nvme"})"),
            wrong("`zero_optimization.offload_param.device`: \"nvme\" keeps the shards of ZeRO stage 3 on disk, and "
                  "`zero_optimization.stage` is 2; set it to 3"));
}

PagerPolicy offload_of(const std::string& keys) {
  return parse_config(R"({"train_batch_size": 1, "zero_optimization": {"stage": 3, )" + keys + "}}", 1).pager;
}

TEST(Zero, ReadsWhatIsOffloaded) {
  EXPECT_EQ(offload_of(R"("offload_optimizer": {"device": "none", "ratio": 0.5})").offload_ratio, 0);
  EXPECT_EQ(offload_of(R"("offload_optimizer": {"device": "cpu"})").offload_ratio, 1);
  const PagerPolicy part =
      offload_of(R"("offload_optimizer": {"device": "cpu", "ratio": 0.25}, "offload_param": null)");
  EXPECT_EQ(part.offload_ratio, 0.25);
  EXPECT_FALSE(part.offload_parameters);
  // Weights that the host keeps are updated there.
  const PagerPolicy weights = offload_of(R"("offload_param": {"device": "cpu", "max_in_cpu": 5})");
  EXPECT_EQ(weights.offload_ratio, 1);
  EXPECT_TRUE(weights.offload_parameters);
  const PagerPolicy none =
      offload_of(R"("offload_optimizer": {"device": "cpu", "ratio": 0}, "offload_param": {"device": "cpu"})");
  EXPECT_FALSE(none.offload_parameters);
  EXPECT_EQ(offload_of(R"("cpu_offload": true)").offload_ratio, 1);
  EXPECT_TRUE(offload_of(R"("cpu_offload_param": true)").offload_parameters);
  EXPECT_EQ(offload_of(R"("cpu_offload": false)").offload_ratio, 0);
}

TEST(Zero, SaysWhereOffloadingHasNoEffect) {
  EXPECT_EQ(zero_log(R"("stage": 0, "offload_optimizer": {"device": "cpu"})"),
            "warning <string>: `zero_optimization.offload_optimizer` has no effect at `zero_optimization.stage` 0; set "
            "the stage to 1, 2 or 3\n");
  EXPECT_EQ(zero_log(R"("stage": 2, "offload_param": {"device": "cpu"})"),
            "warning <string>: `zero_optimization.offload_param` has no effect at `zero_optimization.stage` 2; set the "
            "stage to 3\n");
}

TEST(Zero, RefusesOffloadingThatCannotBe) {
  EXPECT_EQ(zero_refusal(R"("offload_optimizer": {"device": "disk"})").code, ErrorCode::kConfig);
  EXPECT_EQ(zero_refusal(R"("offload_optimizer": {"device": "cpu", "ratio": 1.5})"),
            wrong("`zero_optimization.offload_optimizer.ratio` is 1.5; expected a number from 0 to 1"));
  EXPECT_EQ(zero_refusal(R"("offload_optimizer": {"devise": "cpu"})").code, ErrorCode::kConfig);
}

TEST(Zero, NamesTheKeysOfOffloadingWithoutAMeaning) {
  EXPECT_EQ(zero_log(R"("stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": false})"),
            "info <string>: ignored, because Trireme does not need them (`trireme docs config` says why): "
            "`zero_optimization.offload_optimizer.pin_memory`\n");
}

TEST(Zero, WarnsOfDeprecatedOffloadKeys) {
  EXPECT_EQ(
      zero_log("\"stage\": 2, \"cpu_offload\": true"),
      "warning <string>: `zero_optimization.cpu_offload` is deprecated; write `zero_optimization.offload_optimizer`\n");
  EXPECT_EQ(zero_refusal(R"("cpu_offload": false, "offload_optimizer": {"device": "none"})"),
            wrong("`zero_optimization.cpu_offload` and `zero_optimization.offload_optimizer` exclude each other; keep "
                  "`zero_optimization.offload_optimizer`"));
}

TEST(Zero, WarnsOfTheDeprecatedNameOfGathering16BitWeights) {
  EXPECT_EQ(zero_log("\"stage3_gather_fp16_weights_on_model_save\": true"),
            "warning <string>: `zero_optimization.stage3_gather_fp16_weights_on_model_save` is deprecated; write "
            "`zero_optimization.stage3_gather_16bit_weights_on_model_save`\n"
            "info <string>: ignored, because Trireme does not need them (`trireme docs config` says why): "
            "`zero_optimization.stage3_gather_fp16_weights_on_model_save`\n");
}

TEST(Zero, NamesUnknownKeysAtAnyDepth) {
  EXPECT_EQ(zero_refusal("\"stgae\": 3"), wrong("unknown key `zero_optimization.stgae`. Did you mean `stage`?"));
  EXPECT_EQ(zero_refusal(R"("offload_param": {"devise": "none"})"),
            wrong("unknown key `zero_optimization.offload_param.devise`. Did you mean `device`?"));
}

TEST(Zero, ReadsIgnoreUnusedParameters) {
  EXPECT_TRUE(read_with("\"zero_optimization\": {}").ignore_unused_parameters);
  EXPECT_FALSE(read_with("\"zero_optimization\": {\"ignore_unused_parameters\": false}").ignore_unused_parameters);
}

TEST(Zero, ReadsLeafModulesAsOneTextOrAList) {
  const LeafModuleOptions leaves =
      read_with(R"("zero_optimization": {"leaf_module": {"classes": "Moe", "names": ["a.b", "c"]}})").leaf_modules;
  EXPECT_EQ(leaves.classes, std::vector<std::string>{"Moe"});
  EXPECT_EQ(leaves.names, (std::vector<std::string>{"a.b", "c"}));
  EXPECT_TRUE(leaves.name_suffixes.empty());
  EXPECT_EQ(read_with("\"zero_optimization\": {}").leaf_modules, LeafModuleOptions());
  EXPECT_EQ(zero_refusal(R"("leaf_module": {"class": "Moe"})"),
            wrong("unknown key `zero_optimization.leaf_module.class`. Did you mean `classes`?"));
  EXPECT_EQ(zero_refusal(R"("leaf_module": {"names": 3})"),
            wrong("`zero_optimization.leaf_module.names` is 3; expected a list of strings"));
}

TEST(Zero, RefusesReplicasBesideWhatExcludesThem) {
  const auto refusal = [](const Json& keys, const Degrees& degrees = {}) -> Refusal {
    Json json = {{"train_micro_batch_size_per_gpu", 1}};
    json.update(keys);
    try {
      (void)config_from_json(json, 4, degrees, "<string>");
    } catch (const ConfigError& error) {
      return {error.code(), error.what()};
    }
    return {};
  };
  const auto text = [](const std::string& said, const std::string& beside) {
    return "<string>: " + said + " makes 2 replicas beside " + beside + "; leave one of the two out";
  };
  const Json mics = {{"stage", 3}, {"mics_shard_size", 2}}, hpz = {{"stage", 3}, {"zero_hpz_partition_size", 2}};
  const std::string mics_said = "`zero_optimization.mics_shard_size` = 2";
  const std::string hpz_said = "`zero_optimization.zero_hpz_partition_size` = 2";
  const Refusal unsharded = refusal({{"steps_per_print", 1}}, {.replicas = 2});
  EXPECT_EQ(unsharded.message, text("degrees.replicas=2", "ZeRO stage 0, which shards nothing"));
  EXPECT_EQ(unsharded.code, ErrorCode::kUnsupported);
  EXPECT_EQ(refusal({{"zero_optimization", mics}, {"deterministic", true}}).message,
            text(mics_said, "`deterministic`, whose sums would depend on their number"));
  Json offloading = hpz;
  offloading["offload_optimizer"] = {{"device", "cpu"}};
  EXPECT_EQ(refusal({{"zero_optimization", offloading}}).message,
            text(hpz_said, "offloading, and states over replicas stay on the device"));
  offloading = mics;
  offloading["offload_optimizer"] = {{"device", "cpu"}};
  EXPECT_EQ(refusal({{"zero_optimization", offloading}}).message, "no error");
}

TEST(TriremeSection, ReadsThePagersOwnKeys) {
  const auto pager = read_with(R"("trireme": {"gather": "copy", "live_bytes": 100, "prefetch_bytes": 50,
                                  "merge_below_bytes": 7, "unit_patterns": ["block[0-9]+"], "poison": true,
                                  "register_buffers": true})")
                         .pager;
  EXPECT_EQ(pager.gather, GatherPolicy::kCopy);
  EXPECT_EQ(pager.live_bytes, 100);
  EXPECT_EQ(pager.prefetch_bytes, 50);
  EXPECT_EQ(pager.units.merge_below_bytes, 7);
  EXPECT_EQ(pager.units.patterns, std::vector<std::string>{"block[0-9]+"});
  EXPECT_TRUE(pager.poison);
  EXPECT_TRUE(pager.register_buffers);
}

TEST(TriremeSection, RefusesWhatDoesNotFit) {
  EXPECT_EQ(
      refusal_of("\"trireme\": {\"gather\": \"shard\"}"),
      wrong("`trireme.gather` is \"shard\"; expected one of \"auto\", \"shared\", \"copy\". Did you mean `shared`?"));
  EXPECT_EQ(refusal_of("\"trireme\": {\"unit_patterns\": \"x\"}"),
            wrong("`trireme.unit_patterns` is \"x\"; expected a list of strings"));
  EXPECT_NE(refusal_of("\"trireme\": {\"unit_patterns\": [\"(\"]}")
                .message.find("`trireme.unit_patterns`: '(' is no regular expression: "),
            std::string::npos);
  const std::string deep(100'000, '(');
  EXPECT_NE(refusal_of("\"trireme\": {\"unit_patterns\": [\"" + deep + "\"]}")
                .message.find("`trireme.unit_patterns`: '((((("),
            std::string::npos);
}

}  // namespace
}  // namespace trireme
