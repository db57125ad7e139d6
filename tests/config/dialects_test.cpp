// Files of Accelerate, plugins, and their way to DeepSpeed's keys and back.
#include "trireme/config/dialects.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/config/config_test_support.h"
#include "tests/support/captured_log.h"
#include "tests/support/temporary_folder.h"
#include "trireme/config/source.h"

namespace trireme {
namespace {

Config yaml(const std::string& text, int world_size = 1) { return parse_config(text, world_size, {}, "f.yaml"); }
Config fsdp(const std::string& keys, const std::string& top = "") {
  return yaml("distributed_type: FSDP\n" + top + "\nfsdp_config:\n  fsdp_version: 1\n" + keys);
}
Config deepspeed(const std::string& keys, const std::string& top = "") {
  return yaml("distributed_type: DEEPSPEED\n" + top + "\ndeepspeed_config:\n" + keys);
}
Config json(const std::string& keys) { return read_with(keys); }

Config plugin(const std::string& text) { return config_from_json(Json::parse(text), 1); }

Refusal refusal_of_yaml(const std::string& text) {
  try {
    yaml(text);
  } catch (const ConfigError& error) {
    return {error.code(), error.what()};
  }
  return {};
}

std::string log_of(const std::string& text) {
  CapturedLog log;
  yaml(text);
  return log.text();
}

TEST(Accelerate, StrategiesAreStages) {
  for (const auto& [strategy, stage] :
       {std::pair{"FULL_SHARD", 3}, {"SHARD_GRAD_OP", 2}, {"NO_SHARD", 0}, {"full_shard", 3}, {"2", 2}}) {
    EXPECT_EQ(fsdp(str("  fsdp_sharding_strategy: ", strategy)).pager.stage, stage) << strategy;
    EXPECT_EQ(fsdp(str("  fsdp_reshard_after_forward: ", strategy)).pager.stage, stage) << strategy;
  }
  EXPECT_EQ(
      yaml("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}").pager.stage, 2);
  EXPECT_EQ(
      yaml("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}").pager.stage, 3);
}

TEST(Accelerate, FrameworksHaveTheirOwnDefaults) {
  EXPECT_EQ(yaml("distributed_type: FSDP").pager.stage, 3);
  EXPECT_EQ(yaml("distributed_type: DEEPSPEED").pager.stage, 2);
  EXPECT_EQ(yaml("distributed_type: MULTI_GPU").pager.stage, 0);
  EXPECT_EQ(yaml("distributed_type: 'NO'").pager.stage, 0);
  // DeepSpeed clips by itself, FSDP where the program does.
  EXPECT_EQ(yaml("distributed_type: DEEPSPEED").gradient_clipping, 1);
  EXPECT_EQ(yaml("distributed_type: FSDP").gradient_clipping, 0);
  EXPECT_EQ(yaml("distributed_type: FSDP\ngradient_clipping: 0.5").gradient_clipping, 0.5);
}

TEST(Accelerate, BothFrameworksMeanTheSameConfiguration) {
  const std::string top = "mixed_precision: bf16\ngradient_accumulation_steps: 4\ngradient_clipping: 0.5";
  EXPECT_EQ(fsdp("  fsdp_offload_params: true\n", top),
            deepspeed("  zero_stage: 3\n  offload_optimizer_device: cpu\n  offload_param_device: cpu\n", top));
  EXPECT_EQ(fsdp("  fsdp_sharding_strategy: SHARD_GRAD_OP\n", top),
            json(R"("zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_accumulation_steps": 4,
                    "gradient_clipping": 0.5)"));
}

TEST(Accelerate, PrecisionIsThatOfDeepSpeed) {
  EXPECT_EQ(fsdp("", "mixed_precision: fp16").precision.weight_dtype, at::kHalf);
  EXPECT_EQ(fsdp("", "mixed_precision: 'no'").precision.weight_dtype, at::kFloat);
  EXPECT_EQ(fsdp("", "mixed_precision: no").precision.weight_dtype, at::kFloat);
  EXPECT_EQ(
      refusal_of_yaml("distributed_type: FSDP\nmixed_precision: fp8"),
      not_there("f.yaml:2: `mixed_precision` = \"fp8\" is not there yet; set it to \"bf16\", \"fp16\" or \"no\""));
}

TEST(Accelerate, KeysOfDeepSpeedsPluginWork) {
  const Config config = deepspeed(
      "  zero_stage: 3\n  gradient_accumulation_steps: 2\n  gradient_clipping: 0.1\n  offload_optimizer_device: cpu\n"
      "  offload_param_device: none\n  zero3_save_16bit_model: true\n  zero3_init_flag: true\n"
      "  deepspeed_moe_layer_cls_names: A,B\n");
  EXPECT_EQ(config, json(R"("zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
                           "leaf_module": {"classes": ["A", "B"]}}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1)"));
}

TEST(Accelerate, AFileOfDeepSpeedsIsFilledIn) {
  const testing::TemporaryFolder folder;
  const auto path = folder / "ds.json";
  std::ofstream(path)
      << R"({"train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}})";
  const std::string text =
      str("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ", path.string(), "\n");
  const Config config = yaml(text + "mixed_precision: bf16");
  EXPECT_EQ(config.batch.train_micro_batch_size_per_gpu, 3);
  EXPECT_EQ(config.precision.weight_dtype, at::kBFloat16);
  EXPECT_EQ(config.pager.stage, 1);
  EXPECT_EQ(
      refusal_of_yaml(text + "  zero_stage: 2"),
      wrong("f.yaml:4: `deepspeed_config.zero_stage` and `zero_optimization.stage` of `deepspeed_config_file` say "
            "different things; keep one of the two"));
}

TEST(Accelerate, KeysWithoutAMeaningAreNamed) {
  EXPECT_EQ(
      log_of("distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_use_orig_params: true\n"),
      "info f.yaml: ignored, because Trireme does not need them (`trireme docs config` says why): `num_processes`, "
      "`fsdp_config.fsdp_use_orig_params`\n");
  EXPECT_EQ(log_of("distributed_type: FSDP\ndeepspeed_config:\n  zero_stage: 1\n"),
            "info f.yaml: `deepspeed_config` is read with `distributed_type: DEEPSPEED` alone, and left out here\n");
}

TEST(Accelerate, RefusesByNameWhatIsNotThereYet) {
  for (const char* text :
       {"distributed_type: MEGATRON_LM", "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: FSDP",
        "distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: 2}",
        "distributed_type: FSDP\ndynamo_config: {dynamo_backend: INDUCTOR}",
        "distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing_offload: true}"})
    EXPECT_EQ(refusal_of_yaml(text).code, ErrorCode::kUnsupported) << text;
  EXPECT_EQ(log_of("distributed_type: FSDP\ndynamo_config: {dynamo_backend: 'NO'}\nfp8_config: {}"), "");
}

TEST(Accelerate, HybridStrategiesShardOverTheRanksOfAMachine) {
  const auto hybrid = [](const char* strategy, int machines) {
    return yaml(str("distributed_type: FSDP\nnum_processes: 4\nnum_machines: ", machines,
                    "\nfsdp_config:\n  fsdp_sharding_strategy: ", strategy),
                4);
  };
  for (const auto& [strategy, stage] : {std::pair{"HYBRID_SHARD", 3}, {"HYBRID_SHARD_ZERO2", 2}, {"4", 3}, {"5", 2}}) {
    EXPECT_EQ(hybrid(strategy, 2).pager.stage, stage) << strategy;
    EXPECT_EQ(hybrid(strategy, 2).degrees.replicas, 2) << strategy;
    EXPECT_EQ(hybrid(strategy, 1).degrees.replicas, 1) << strategy;
  }
  EXPECT_EQ(
      refusal_of_yaml("distributed_type: FSDP\nnum_machines: 2\nfsdp_config: {fsdp_sharding_strategy: "
                      "HYBRID_SHARD}"),
      wrong("f.yaml:3: `fsdp_config.fsdp_sharding_strategy` = \"HYBRID_SHARD\" makes 2 copies of an unknown number "
            "of processes; set `num_processes` to a multiple of 2"));
}

TEST(Accelerate, AxesReachReplicasAndSequences) {
  const auto axes = [](const char* keys) {
    return yaml(str("distributed_type: FSDP\nnum_processes: 4\nparallelism_config:\n", keys), 4);
  };
  EXPECT_EQ(axes("  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n").degrees.replicas,
            2);
  EXPECT_EQ(axes("  parallelism_config_dp_replicate_size: 2\n").degrees.replicas, 2);
  EXPECT_EQ(axes("  parallelism_config_sp_size: 2\n").degrees.sequence, 2);
  EXPECT_EQ(yaml("distributed_type: MULTI_GPU\nnum_processes: 4\nparallelism_config: "
                 "{parallelism_config_dp_replicate_size: 4}",
                 4)
                .degrees.replicas,
            1);
  EXPECT_EQ(
      refusal_of_yaml("distributed_type: FSDP\nnum_processes: 4\nparallelism_config: "
                      "{parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 3}"),
      wrong("f.yaml:3: `parallelism_config.parallelism_config_dp_replicate_size` = 2 copies of 3 ranks are not the 4 "
            "of `num_processes`; let them agree"));
}

std::vector<std::string> mistakes_with_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (const ConfigMistake& mistake : mistakes_in(parse_source(text, "f.yaml"), 1))
    lines.push_back(str(mistake.file, mistake.file.empty() ? "" : ":", mistake.line, " ", mistake.message));
  return lines;
}

TEST(Accelerate, OneMistakeHidesNoOther) {
  const std::string bf61 =
      "f.yaml: `mixed_precision` is \"bf61\"; expected one of \"no\", \"bf16\", \"fp16\", \"fp8\". Did you mean "
      "`bf16`?";
  EXPECT_EQ(mistakes_with_lines("distributed_type: DEEPSPEED\nmixed_precision: bf61\ndeepspeed_config:\n"
                                "  deepspeed_config_file: /nowhere.json\n"),
            (std::vector<std::string>{"2 " + bf61,
                                      "4 f.yaml: `deepspeed_config.deepspeed_config_file` = \"/nowhere.json\": "
                                      "/nowhere.json: open for reading failed: No such file or directory; correct the "
                                      "path"}));
  EXPECT_EQ(
      mistakes_with_lines("distributed_type: FSDP\nmixed_precision: bf61\nfsdp_config: 3\nparallelism_config: [1]\n"),
      (std::vector<std::string>{"2 " + bf61, "3 f.yaml: `fsdp_config` is 3; expected an object { … }",
                                "4 f.yaml: `parallelism_config` is [1]; expected an object { … }"}));
  EXPECT_EQ(mistakes_with_lines("distributed_type: FSDP\nmixed_precision: bf61\nfsdp_config:\n\tfsdp_version: 1\n"),
            (std::vector<std::string>{"2 " + bf61, "4 f.yaml: line 4 is indented by a tab; write blanks"}));
}

TEST(Accelerate, EveryMistakeIsToldWhereOptionsAloneAreRead) {
  try {
    (void)options_of(
        parse_source("distributed_type: FSDP\nmixed_precision: bf61\nfsdp_config:\n"
                     "  fsdp_reshard_after_forward: FULLSHARD\n",
                     "f.yaml"));
    FAIL();
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("f.yaml:2: `mixed_precision`"), std::string::npos) << text;
    EXPECT_NE(text.find("\nf.yaml:4: `fsdp_config.fsdp_reshard_after_forward`"), std::string::npos) << text;
    EXPECT_TRUE(text.ends_with(". Did you mean `FULL_SHARD`?")) << text;
  }
}

TEST(Accelerate, ValuesOfKeysWithoutAMeaningAreChecked) {
  for (const char* text : {"num_processes: four",
                           "num_machines: 0",
                           "machine_rank: -1",
                           "main_process_port: high",
                           "main_process_ip: 3",
                           "same_network: maybe",
                           "gpu_ids: [0]",
                           "commands: 3",
                           "fsdp_config: {fsdp_auto_wrap_policy: SIZE}",
                           "fsdp_config: {fsdp_min_num_params: many}",
                           "fsdp_config: {fsdp_transformer_layer_cls_to_wrap: 3}",
                           "fsdp_config: {fsdp_backward_prefetch: BACKWARD}",
                           "fsdp_config: {fsdp_state_dict_type: FULL}",
                           "parallelism_config: {parallelism_config_dp_shard_size: two}",
                           "parallelism_config: {parallelism_config_sp_backend: 3}",
                           "parallelism_config: {parallelism_config_sp_backend: deepsped}",
                           "parallelism_config: {parallelism_config_sp_seq_length: long}",
                           "parallelism_config: {parallelism_config_sp_seq_length: 0}",
                           "parallelism_config: {parallelism_config_sp_seq_length_is_variable: maybe}",
                           "parallelism_config: {parallelism_config_sp_attn_implementation: eager}",
                           "parallelism_config: {parallelism_config_cp_backend: gloo}",
                           "parallelism_config: {parallelism_config_cp_comm_strategy: ring}",
                           "downcast_bf16: maybe",
                           "downcast_bf16: [1]",
                           "mpirun_config: 3",
                           "mpirun_config: {mpirun_hostfile: 3}",
                           "mpirun_config: {mpirun_hostfil: hosts}",
                           "mpirun_config: {mpirun_ccl: [1]}",
                           "fsdp_config: {fsdp_mixed_precision_policy: {output_dtype: fp61}}"})
    EXPECT_EQ(refusal_of_yaml(str("distributed_type: FSDP\n", text)).code, ErrorCode::kConfig) << text;
  EXPECT_EQ(refusal_of_yaml("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_multinode_launcher: ssh}").code,
            ErrorCode::kConfig);
}

TEST(Accelerate, ValuesOfTheseKeysWithoutAMeaningAreTaken) {
  const std::string log = log_of(
      "distributed_type: FSDP\nnum_processes: 1\ndowncast_bf16: 'no'\nmpirun_config: {mpirun_hostfile: hosts, "
      "mpirun_ccl: '1'}\nparallelism_config:\n  parallelism_config_sp_seq_length: 256\n"
      "  parallelism_config_sp_seq_length_is_variable: false\n"
      "  parallelism_config_sp_attn_implementation: kernels-community/flash-attn2\n"
      "  parallelism_config_cp_backend: torch\n  parallelism_config_cp_comm_strategy: alltoall\n");
  for (const char* key : {"downcast_bf16", "mpirun_hostfile", "mpirun_ccl", "sp_seq_length",
                          "sp_seq_length_is_variable", "sp_attn_implementation", "cp_backend", "cp_comm_strategy"})
    EXPECT_NE(log.find(str(key, "`")), std::string::npos) << key << ": " << log;
  for (const char* text : {"mpirun_config: {}", "downcast_bf16: no", "parallelism_config: {}"})
    EXPECT_EQ(refusal_of_yaml(str("distributed_type: FSDP\n", text)), Refusal{}) << text;
}

TEST(Accelerate, WhatWouldChangeAModelIsRefusedWithTheFix) {
  EXPECT_EQ(refusal_of_yaml("distributed_type: FSDP\ndowncast_bf16: yes").message,
            "f.yaml:2: `downcast_bf16` = true is not there yet; it is of TPUs; remove it or set it to \"no\"");
  EXPECT_EQ(refusal_of_yaml("distributed_type: FSDP\nfsdp_config: {fsdp_param_init_fn: init}").message,
            "f.yaml:2: `fsdp_config.fsdp_param_init_fn` = \"init\" is not there yet; remove it");
  // FSDP 2 has its output's dtype follow the mode.
  EXPECT_EQ(plugin(R"({"fsdp_version": 2, "mixed_precision_policy": {"param_dtype": "bf16", "output_dtype":
      "torch.bfloat16"}})")
                .precision.weight_dtype,
            at::kBFloat16);
  EXPECT_EQ(fsdp("  fsdp_mixed_precision_policy: {output_dtype: fp32}").precision.weight_dtype, at::kFloat);
  EXPECT_EQ(
      refusal_of_yaml("distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: "
                      "{fsdp_mixed_precision_policy: {output_dtype: fp32}}")
          .message,
      "f.yaml:3: `fsdp_config.fsdp_mixed_precision_policy.output_dtype` = \"fp32\" is not there yet; outputs have "
      "the dtype of the weights: set it to \"bf16\", or remove it and cast what the model returns");
}

TEST(Accelerate, AMistakeInTheFileOfDeepSpeedsNamesThatFileAndItsLine) {
  const testing::TemporaryFolder folder;
  const std::string inner = (folder.path() / "ds.json").string();
  std::ofstream(inner) << "{\"train_batch_size\": 1,\n \"zero_optimization\": {\n  \"stage\": 9},\n \"bf61\": {},\n "
                          "\"bf16\": true}";
  const auto found =
      mistakes_with_lines(str("distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  "
                              "deepspeed_config_file: ",
                              inner, "\n  zero3_init_flag: 3\n"));
  EXPECT_EQ(found, (std::vector<std::string>{
                       "5 f.yaml: `deepspeed_config.zero3_init_flag` is 3; expected true or false",
                       str(inner, ":3 ", inner, ": `zero_optimization.stage` is 9; expected an integer from 0 to 3"),
                       str(inner, ":4 ", inner, ": unknown key `bf61`. Did you mean `bf16`?"),
                       str(inner, ":5 ", inner, ": `bf16` is true; expected an object { … }")}));
}

TEST(Accelerate, MistakesHaveTheKeysAndLinesOfTheFile) {
  const auto found = mistakes_in(parse_source("distributed_type: FSDP\nmixed_precision: bf61\nfsdp_config:\n"
                                              "  fsdp_offload_parms: true\n  fsdp_use_orig_params: 3\n",
                                              "f.yaml"),
                                 1);
  std::vector<std::string> lines;
  for (const ConfigMistake& mistake : found) lines.push_back(str(mistake.line, " ", mistake.message));
  EXPECT_EQ(lines, (std::vector<std::string>{
                       "2 f.yaml: `mixed_precision` is \"bf61\"; expected one of \"no\", \"bf16\", \"fp16\", \"fp8\". "
                       "Did you mean `bf16`?",
                       "4 f.yaml: unknown key `fsdp_config.fsdp_offload_parms`. Did you mean `fsdp_offload_params`?",
                       "5 f.yaml: `fsdp_config.fsdp_use_orig_params` is 3; expected true or false"}));
  EXPECT_EQ(refusal_of_yaml("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 7\n"),
            wrong("f.yaml:3: `deepspeed_config.zero_stage` is 7; expected an integer from 0 to 3"));
  EXPECT_EQ(refusal_of_yaml("compute_environment: LOCAL_MACHINE"),
            wrong("f.yaml: `distributed_type` is missing; set it to FSDP, DEEPSPEED or MULTI_GPU"));
}

TEST(Accelerate, VersionsOfFsdpHaveTheirOwnWords) {
  EXPECT_EQ(
      refusal_of_yaml("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: FULL_SHARD}")
          .message,
      "f.yaml:2: `fsdp_config.fsdp_reshard_after_forward` is \"FULL_SHARD\"; expected true or false with "
      "`fsdp_version` "
      "2");
  EXPECT_EQ(
      refusal_of_yaml("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_reshard_after_forward: true}").code,
      ErrorCode::kConfig);
}

TEST(Yaml, NamesTheLineOfAMistakeInItsSyntax) {
  EXPECT_EQ(refusal_of_yaml("a: 1\nb: [1\n").message.substr(0, 9), "f.yaml:3:");
  EXPECT_EQ(refusal_of_yaml("a: 1\na: 2\n"), wrong("f.yaml:2:1: the key `a` stands twice; remove one of the two"));
  EXPECT_EQ(refusal_of_yaml("a: &x [*x]\n").code, ErrorCode::kConfig);
}

TEST(Yaml, RefusesAliasesThatRepeatEachOther) {
  std::string laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 20; ++i) {
    const std::string former = "*a" + std::to_string(i - 1);
    laughs += str("a", i, ": &a", i, " [", former);
    for (int n = 1; n < 10; ++n) laughs += ", " + former;
    laughs += "]\n";
  }
  EXPECT_NE(refusal_of_yaml(laughs).message.find("more than 200000 values, those that aliases repeat included"),
            std::string::npos)
      << refusal_of_yaml(laughs).message;
  std::string deep = "a0: &a0 [x]\n";
  for (int i = 1; i < 150; ++i) deep += str("a", i, ": &a", i, " [*a", i - 1, "]\n");
  EXPECT_NE(refusal_of_yaml(deep).message.find("nested deeper than 100 levels"), std::string::npos);
}

TEST(Yaml, TakesAliasesForWhatTheyName) {
  EXPECT_EQ(yaml("train_batch_size: &n 4\ntrain_micro_batch_size_per_gpu: *n\n"),
            parse_config(R"({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4})", 1));
}

TEST(Yaml, RefusesTextsThatWouldUseUpStackMemoryOrTime) {
  for (const char* opening : {"[", "- ", "{a: ", "? "}) {
    std::string text = "a: ";
    for (int i = 0; i < 100'000; ++i) text += opening;
    EXPECT_EQ(refusal_of_yaml(text).message.substr(0, 7), "f.yaml:") << opening;
  }
  std::string blocks;
  for (int i = 0; i < 1500; ++i) blocks += std::string(i, ' ') + "a:\n";
  EXPECT_NE(refusal_of_yaml(blocks).message.find("nested deeper than 100 levels"), std::string::npos);
  std::string many;
  for (int i = 0; i < 200'001; ++i) many += str("k", i, ": 1\n");
  EXPECT_NE(refusal_of_yaml(many).message.find("more than 200000 values"), std::string::npos);
  EXPECT_NE(refusal_of_yaml(std::string(100'000, 'k') + ": 1\n").message.find("f.yaml:1"), std::string::npos);
}

TEST(Yaml, NamesTheFileOfBytesThatAreNoUtf8) {
  for (const char* text : {"a: \xff\n", "\xff: 1\n", "a: \"\xc3\"\n"})
    EXPECT_EQ(refusal_of_yaml(text).message.substr(0, 9), "f.yaml:1:") << refusal_of_yaml(text).message;
}

TEST(Yaml, MayHoldDeepSpeedsKeysToo) {
  EXPECT_EQ(yaml("train_batch_size: 1\nzero_optimization: {stage: 3}\n"),
            parse_config(R"({"train_batch_size": 1, "zero_optimization": {"stage": 3}})", 1));
}

TEST(Plugin, IsReadLikeAFile) {
  EXPECT_EQ(
      plugin(
          R"({"fsdp_version": 2, "reshard_after_forward": true, "cpu_offload": true, "activation_checkpointing": true,
                      "mixed_precision_policy": "bf16"})"),
      fsdp("  fsdp_offload_params: true\n  fsdp_activation_checkpointing: true\n", "mixed_precision: bf16"));
  const Config config = plugin(R"({"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision_policy":
      {"param_dtype": "torch.bfloat16", "reduce_dtype": "torch.float32", "buffer_dtype": "fp32"}})");
  EXPECT_EQ(config.pager.stage, 2);
  EXPECT_EQ(config.precision.weight_dtype, at::kBFloat16);
  EXPECT_EQ(config.precision.communication_dtype, at::kFloat);
  EXPECT_EQ(config.precision.buffer_dtype, at::kFloat);
}

TEST(Plugin, HasNoMachinesForAHybridStrategy) {
  try {
    plugin(R"({"sharding_strategy": "HYBRID_SHARD"})");
    ADD_FAILURE() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "<json>: `sharding_strategy` = \"HYBRID_SHARD\" is not there yet; use FULL_SHARD or SHARD_GRAD_OP, or "
                 "DeepSpeed's keys with `zero_optimization.mics_shard_size`, the ranks of a machine");
  }
}

TEST(Plugin, MistakesHaveItsKeys) {
  try {
    plugin(R"({"reshard_after_forward": true, "cpu_offload": "yes"})");
    ADD_FAILURE() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "<json>: `cpu_offload` is \"yes\"; expected true or false");
  }
}

/// The batch size, which files of Accelerate leave open, as their reader takes it.
ConfigSource converted(const ConfigSource& source, Dialect to) {
  std::string text = convert(source, to).text;
  if (const size_t open = text.find("\"auto\""); open != std::string::npos) text.replace(open, 6, "1");
  return parse_source(text, to == Dialect::kFsdp ? "f.yaml" : "f.json");
}

Config through(const ConfigSource& source, Dialect to) { return config_from_source(converted(source, to), 1); }

TEST(Convert, EveryKeyOfFsdpSurvivesTheWayThereAndBack) {
  for (const char* keys : {"", "  fsdp_sharding_strategy: FULL_SHARD\n", "  fsdp_sharding_strategy: SHARD_GRAD_OP\n",
                           "  fsdp_sharding_strategy: NO_SHARD\n", "  fsdp_offload_params: true\n",
                           "  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_offload_params: true\n",
                           "  fsdp_activation_checkpointing: true\n"})
    for (const char* top : {"mixed_precision: 'no'\n", "mixed_precision: bf16\n", "mixed_precision: fp16\n"}) {
      const std::string text = str("distributed_type: FSDP\n", top, "fsdp_config:\n  fsdp_version: 1\n", keys);
      const ConfigSource source = parse_source(text, "f.yaml");
      const Config config = config_from_source(source, 1);
      EXPECT_EQ(through(source, Dialect::kDeepSpeed), config) << text;
      EXPECT_EQ(through(source, Dialect::kFsdp), config) << convert(source, Dialect::kFsdp).text;
      EXPECT_EQ(convert(converted(source, Dialect::kDeepSpeed), Dialect::kFsdp).left_out, std::vector<std::string>{})
          << text;
    }
}

TEST(Convert, EveryKeyOfDeepSpeedsPluginSurvivesTheWayToJson) {
  for (const char* keys : {"  zero_stage: 1\n", "  zero_stage: 3\n  offload_optimizer_device: cpu\n",
                           "  zero_stage: 3\n  offload_param_device: cpu\n", "  gradient_accumulation_steps: 3\n",
                           "  gradient_clipping: 0.5\n", "  zero3_save_16bit_model: true\n",
                           "  zero_stage: 3\n  deepspeed_moe_layer_cls_names: A\n"}) {
    const ConfigSource source = parse_source(str("distributed_type: DEEPSPEED\ndeepspeed_config:\n", keys), "f.yaml");
    EXPECT_EQ(through(source, Dialect::kDeepSpeed), config_from_source(source, 1)) << keys;
  }
}

TEST(Convert, GoesRoundWithTheBatchSizeLeftToTheProgram) {
  for (const char* text :
       {"distributed_type: FSDP", "distributed_type: FSDP\nmixed_precision: bf16",
        "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}", "distributed_type: MULTI_GPU",
        "distributed_type: 'NO'", "distributed_type: MULTI_CPU", "distributed_type: DEEPSPEED\ngradient_clipping: 0",
        "distributed_type: FSDP\nnum_processes: 4\nparallelism_config: "
        "{parallelism_config_dp_replicate_size: 2}"}) {
    const ConfigSource source = parse_source(text, "f.yaml");
    const ConfigSource there = parse_source(convert(source, Dialect::kDeepSpeed, 4).text, "f.json");
    const Conversion back = convert(there, Dialect::kFsdp, 4);
    EXPECT_EQ(back.left_out, std::vector<std::string>{}) << text;
    EXPECT_EQ(yaml(back.text, 4), config_from_source(source, 4)) << text << "\n" << back.text;
  }
}

TEST(Convert, NamesWhatFsdpHasNoWordForAndWhatToDoInstead) {
  const ConfigSource source = parse_source(
      R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2})",
      "f.json");
  EXPECT_EQ(
      convert(source, Dialect::kFsdp).left_out,
      (std::vector<std::string>{
          "`gradient_accumulation_steps` = 2: give it to Accelerator(gradient_accumulation_steps=…)",
          "`gradient_clipping` = 1.0: call accelerator.clip_grad_norm_(model.parameters(), …) before optimizer.step()",
          "`train_batch_size` = 2: give it to the program's DataLoader(batch_size=…)",
          "`zero_optimization.stage` = 1: FSDP has no stage 1; SHARD_GRAD_OP, which stands there, gives the same "
          "losses"}));
}

TEST(Convert, NamesTheModesThatTheModelsDtypeChoosesInFsdp) {
  const auto left_out = [](const char* text, const char* file, Dialect to) {
    return convert(parse_source(text, file), to).left_out;
  };
  const std::string low =
      R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_optimization": {"stage": 3}, "bf16":
          {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}})";
  const std::vector<std::string> settings = left_out(low.c_str(), "f.json", Dialect::kFsdp);
  ASSERT_GE(settings.size(), 2);
  EXPECT_EQ(settings[0],
            "`bf16.bf16_master_weights_and_grads` = true: load the model in bf16 in the program, and set "
            "mixed_precision to no");
  const char* const fsdp = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: ";
  EXPECT_EQ(
      left_out(str(fsdp, "'no'").c_str(), "f.yaml", Dialect::kDeepSpeed),
      (std::vector<std::string>{"a model that the program loads in bf16 is stepped in bf16 by FSDP, and has fp32 "
                                "masters here; for the same set `bf16.enabled`, "
                                "`bf16.bf16_master_weights_and_grads` and `bf16.bf16_optimizer_states` to true"}));
  EXPECT_EQ(left_out(str(fsdp, "bf16").c_str(), "f.yaml", Dialect::kDeepSpeed), std::vector<std::string>{});
}

TEST(Convert, WritesTheKeysOfAccelerate) {
  const ConfigSource source = parse_source(
      R"({"train_batch_size": 1, "gradient_clipping": 0, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}})",
      "f");
  EXPECT_EQ(convert(source, Dialect::kFsdp).text,
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
            "  fsdp_reshard_after_forward: true\n  fsdp_offload_params: false\n  fsdp_activation_checkpointing: false\n"
            "mixed_precision: bf16\n");
}

TEST(Map, NamesEveryKeyOfBothFrameworks) {
  const std::string table = dialect_map();
  for (const char* key :
       {"fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params", "fsdp_min_num_params",
        "zero_stage", "offload_param_device", "zero3_init_flag", "mixed_precision"})
    EXPECT_NE(table.find(str("`", key, "`")), std::string::npos) << key;
}

}  // namespace
}  // namespace trireme
