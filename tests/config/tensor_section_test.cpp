// `tensor_parallel`: over how many ranks layers are cut, and by which rules.
#include <gtest/gtest.h>

#include "tests/config/config_test_support.h"
#include "tests/support/captured_log.h"

namespace trireme {
namespace {

Config read_section(const std::string& section, int world_size = 4) {
  return read_with(R"("tensor_parallel": )" + section, world_size);
}

Refusal refusal_of_section(const std::string& section, int world_size = 4) {
  return refusal_of(R"("tensor_parallel": )" + section, world_size);
}

TEST(TensorSection, IsOffBelowTwoRanks) {
  for (const char* section : {R"({"autotp_size": 0})", R"({"autotp_size": 1, "tp": {"tp_size": 1}})", "{}",
                              R"({"partition_config": {"tp_size": 1}})"}) {
    const Config config = read_section(section);
    EXPECT_EQ(config.degrees, (Degrees{.data = 4})) << section;
    EXPECT_EQ(config.tensor.autotp_size, 0) << section;
  }
}

TEST(TensorSection, HasOneDegreeUnderThreeNames) {
  for (const char* section :
       {R"({"autotp_size": 2})", R"({"tp": {"tp_size": 2}})", R"({"partition_config": {"tp_size": 2}})",
        R"({"autotp_size": 2, "tp": {"tp_size": 1}})", R"({"autotp_size": 0, "tp": {"tp_size": 2}})",
        R"({"autotp_size": 2, "tp": {"tp_size": 2}, "partition_config": {"tp_size": 2}})"}) {
    const Config config = read_section(section);
    EXPECT_EQ(config.degrees, (Degrees{.data = 2, .tensor = 2})) << section;
    EXPECT_EQ(config.tensor.autotp_size, 2) << section;
    EXPECT_EQ(config.batch.train_batch_size, 2) << section;
    EXPECT_EQ(parse_config(to_text(config), 4), config) << section;
    EXPECT_EQ(parse_config(to_text(config), 4, config.degrees), config) << section;
  }
}

TEST(TensorSection, HasRules) {
  const Config config = read_section(R"({"autotp_size": 2, "preset_model": "LLaMA", "tp": {"tp_grain_size": 8},
      "partition_config": {"layer_specs": [
          {"patterns": ["a", "b"], "partition_type": "row", "model_types": ["x"]},
          {"patterns": ["qkv"], "shape": [[8, 4, 4], 16]},
          {"patterns": ["up"], "shape": [2, -1], "grad_allreduce": true},
          {"patterns": ["r"], "partition_type": "row", "shape": [-1, 3]},
          {"patterns": ["c"], "partition_dim": 1, "gather_output": true},
          {"patterns": ["s"], "partition_type": "skip"}],
        "use_default_specs": false, "strict_mode": true, "embedding_partition_dim": 0, "lm_head_patterns": ["out"]}})");
  EXPECT_EQ(config.tensor.preset_model, "llama");
  EXPECT_EQ(config.tensor.tp_grain_size, 8);
  ASSERT_TRUE(config.tensor.partition_config);
  const PartitionConfig& rules = *config.tensor.partition_config;
  ASSERT_EQ(rules.layer_specs.size(), 6);
  EXPECT_EQ(rules.layer_specs[1].sub_sizes, (std::vector<int64_t>{8, 4, 4}));
  EXPECT_EQ(rules.layer_specs[1].inputs, 16);
  EXPECT_EQ(rules.layer_specs[3].sub_count, 3);
  EXPECT_TRUE(rules.strict_mode);
  EXPECT_EQ(parse_config(to_text(config), 4), config);
}

TEST(TensorSection, OfADegreeThatContradictsIsRefused) {
  EXPECT_EQ(refusal_of_section(R"({"autotp_size": 2, "tp": {"tp_size": 4}})"),
            wrong("`tensor_parallel.tp.tp_size` = 4 and `tensor_parallel.autotp_size` = 2; let them agree, or remove "
                  "one of the two"));
  EXPECT_EQ(
      refusal_of_section(R"({"tp": {"tp_size": 4}, "partition_config": {"tp_size": 2}})"),
      wrong("`tensor_parallel.partition_config.tp_size` = 2 and `tensor_parallel.tp.tp_size` = 4; let them agree, "
            "or remove one of the two"));
  EXPECT_EQ(refusal_of_section(R"({"autotp_size": 3})"),
            wrong("`tensor_parallel.autotp_size` = 3 must divide the 4 ranks; change it, or the number of ranks"));
  EXPECT_EQ(refusal_of_section(R"({"tp": {"tp_size": 3}})"),
            wrong("`tensor_parallel.tp.tp_size` = 3 must divide the 4 ranks; change it, or the number of ranks"));
  EXPECT_EQ(refusal_of_section(R"({"autotp_size": -1})"),
            wrong("`tensor_parallel.autotp_size` is -1; expected an integer >= 0"));
  try {
    parse_config(R"({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}})", 4, {.tensor = 4});
    ADD_FAILURE() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(
        error.what(),
        "<string>: `tensor_parallel.autotp_size` = 2, and the program's tensor degree is 4; remove the key, or "
        "set it to that");
  }
}

TEST(TensorSection, TakesTheProgramsDegree) {
  const Config config = parse_config(R"({"train_micro_batch_size_per_gpu": 1})", 4, {.tensor = 2});
  EXPECT_EQ(config.tensor.autotp_size, 2);
  EXPECT_EQ(config.degrees.data, 2);
}

TEST(TensorSection, OfWrongRulesIsRefused) {
  EXPECT_EQ(refusal_of_section(R"({"autotp_size": 2, "preset_model": "lama"})").message.substr(0, 60),
            std::string("`tensor_parallel.preset_model` is \"lama\"; expected one of \"ll").substr(0, 60));
  EXPECT_EQ(refusal_of_section(R"({"autotp_size": 2, "partition_config": {"layer_spec": []}})"),
            wrong("tensor_parallel.partition_config: unknown key `layer_spec`. Did you mean `layer_specs`?"));
  EXPECT_EQ(refusal_of_section(R"({"partition_config": {"layer_specs": [{"patterns": []}]}})"),
            wrong("tensor_parallel.partition_config.layer_specs[0].patterns: expected at least one pattern"));
  EXPECT_EQ(refusal_of_section(R"({"autotp_size": 2, "tp": {"tp_grain_size": 0}})"),
            wrong("`tensor_parallel.tp.tp_grain_size` is 0; expected an integer >= 1"));
  EXPECT_EQ(refusal_of_section(R"({"autotp_sizes": 2})"),
            wrong("unknown key `tensor_parallel.autotp_sizes`. Did you mean `autotp_size`?"));
}

TEST(TensorSection, OverlappedSumsAreAllReduces) {
  EXPECT_TRUE(read_section(R"({"autotp_size": 2, "tp_overlap_comm": true})").tensor.tp_overlap_comm);
  EXPECT_EQ(
      refusal_of_section(R"({"autotp_size": 2, "tp_overlap_comm": true, "sequence_parallel": true})"),
      wrong("`tensor_parallel.tp_overlap_comm` overlaps all-reduces, and with `tensor_parallel.sequence_parallel` "
            "sums are reduce-scatters; remove one of the two"));
}

TEST(TensorSection, BesideReplicas) {
  const Degrees expected{.data = 4, .tensor = 2, .replicas = 2};
  EXPECT_EQ(
      read_with(R"("tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3, "mics_shard_size": 2})", 8)
          .degrees,
      expected);
}

TEST(TensorSection, KeysWithoutMeaningAreNamedWhereLayersAreCut) {
  const std::string keys = R"("dtype": "bf16", "keep_module_on_host": true)";
  for (const bool is_on : {false, true}) {
    CapturedLog log;
    read_section(str(R"({"autotp_size": )", is_on ? 2 : 0, ", ", keys, "}"));
    EXPECT_EQ(log.text(), is_on ? "info <string>: ignored, because Trireme does not need them (`trireme docs config` "
                                  "says why): `tensor_parallel.dtype`, "
                                  "`tensor_parallel.keep_module_on_host`\n"
                                : "");
  }
}

TEST(TensorSection, KeysThatAreNotThereYetAreRefusedWhereLayersAreCut) {
  const struct {
    const char* keys;
    const char* message;
  } cases[] = {
      {R"("kernel_inject": true)",
       "`tensor_parallel.kernel_inject` = true is not there yet; it is for inference; remove it or set it to false"},
      {R"("injection_policy_tuple": ["a"])",
       "`tensor_parallel.injection_policy_tuple` = [\"a\"] is not there yet; write `partition_config`, or remove it"},
      {R"("tp": {"mpu": 1})",
       "`tensor_parallel.tp.mpu` = 1 is not there yet; `autotp_size` makes the groups; remove it"},
      {R"("tp": {"tp_group": 1})",
       "`tensor_parallel.tp.tp_group` = 1 is not there yet; `autotp_size` makes the groups; remove it"}};
  for (const auto& [keys, message] : cases) {
    EXPECT_EQ(refusal_of_section(str(R"({"autotp_size": 2, )", keys, "}")), not_there(message));
    EXPECT_EQ(refusal_of_section(str("{", keys, "}")), Refusal{});
  }
}

}  // namespace
}  // namespace trireme
