#include "trireme/config/config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/config/config_test_support.h"
#include "tests/support/captured_log.h"
#include "tests/support/temporary_folder.h"

namespace trireme {
namespace {

TEST(Config, HasDeepSpeedsDefaults) {
  const Config config = default_config(4);
  EXPECT_EQ(config.batch, (BatchSizes{4, 1, 1}));
  EXPECT_FALSE(config.optimizer.has_value());
  EXPECT_FALSE(config.scheduler.has_value());
  EXPECT_EQ(config.precision, PrecisionOptions{});
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_TRUE(config.ignore_unused_parameters);
  EXPECT_EQ(config.steps_per_print, 0);
  EXPECT_EQ(config.checkpoint.tag_validation, TagValidation::kWarn);
}

TEST(Config, ReadsItsOwnResolvedFormBack) {
  const std::string texts[] = {
      R"({"train_batch_size": 4, "fp16": {"enabled": true, "auto_cast": true, "initial_scale_power": 5, "loss_scale_window": 7,
          "hysteresis": 3, "consecutive_hysteresis": true, "min_loss_scale": 0.5}, "prescale_gradients": true,
          "data_types": {"grad_accum_dtype": "fp16", "buffer_dtype": "fp32"}, "communication_data_type": "fp32"})",
      R"({"train_batch_size": 4, "torch_autocast": {"enabled": true, "dtype": "torch.float16", "lower_precision_safe_modules": ["a"]},
          "fp16": {"loss_scale": 128}, "gradient_allreduce_op": "sum", "gradient_predivide_factor": 3})",
      R"({"train_batch_size": 4})",
      R"({"train_batch_size": 24, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5, "steps_per_print": 7, "deterministic": true,
          "bf16": {"enabled": true, "check_grad_overflow": false}, "data_types": {"grad_accum_dtype": "bf16"},
          "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.1, 0.2], "eps": 1e-3, "weight_decay": 0.3, "adam_w_mode": false}},
          "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": "auto", "warmup_min_lr": 0.01, "warmup_type": "linear"}},
          "zero_optimization": {"stage": 3, "ignore_unused_parameters": false, "max_live_parameters": 1e30},
          "trireme": {"gather": "shared", "merge_below_bytes": 3, "unit_patterns": ["a", "b\\."], "poison": true,
                      "register_buffers": true},
          "checkpoint": {"tag_validation": "FAIL"}})",
      R"({"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"momentum": 0.9, "nesterov": true}},
          "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.1}},
          "trireme": {"gather": "copy", "prefetch_bytes": 0, "live_bytes": 1}, "checkpoint": {"tag_validation": "ignore"}})",
      R"({"train_batch_size": 4, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}})",
      R"({"train_batch_size": 4, "scheduler": {"type": "constant"}})"};
  for (const std::string& text : texts) {
    const Config config = parse_config(text, 4);
    CapturedLog log;
    EXPECT_EQ(config_from_json(to_json(config), 4), config) << to_text(config);
    EXPECT_EQ(parse_config(to_text(config), 4), config) << to_text(config);
    EXPECT_EQ(log.text(), "");  // nothing in it is deprecated or without meaning
  }
}

TEST(Config, SpellsOutEveryDefault) {
  Json json = to_json(default_config(2));
  json["trireme"].erase("unit_patterns");          // the pager's own default, a regular expression
  json["zero_optimization"].erase("leaf_module");  // a long list of classes
  EXPECT_EQ(
      json.dump(),
      R"({"train_batch_size":2,"train_micro_batch_size_per_gpu":1,"gradient_accumulation_steps":1,)"
      R"("gradient_clipping":1.0,"managed_gradient_accumulation":true,)"
      R"("bf16":{"enabled":false,"check_grad_overflow":true,"bf16_master_weights_and_grads":false,)"
      R"("bf16_optimizer_states":false},)"
      R"("fp16":{"enabled":false,"auto_cast":false,"loss_scale":0.0,"initial_scale_power":16,"loss_scale_window":1000,)"
      R"("hysteresis":2,"consecutive_hysteresis":false,"min_loss_scale":1.0},"torch_autocast":{"enabled":false,)"
      R"("dtype":"bf16","lower_precision_safe_modules":["torch.nn.Linear","torch.nn.Conv1d","torch.nn.Conv2d",)"
      R"("torch.nn.Conv3d"]},"data_types":{"grad_accum_dtype":"fp32"},"gradient_allreduce_op":"mean",)"
      R"("gradient_predivide_factor":1.0,"zero_optimization":{"stage":0,)"
      R"("offload_optimizer":{"device":"none","nvme_path":null,"buffer_count":4,"ratio":1.0},"offload_param":{"device":"none","nvme_path":null,"buffer_count":5},)"
      R"("ignore_unused_parameters":true,"mics_shard_size":-1,"zero_hpz_partition_size":1},)"
      R"("trireme":{"gather":"auto","live_bytes":4000000000,"prefetch_bytes":200000000,"merge_below_bytes":65536,)"
      R"("sequence_attention":"ulysses","stochastic_rounding":false,"poison":false,"register_buffers":false,"recompute":"none",)"
      R"("tiled":{"loss_tokens":0,"mlp_tokens":0},"pipeline":{"schedule":"1f1b","chunks":1,"whole_gradients":"auto"},)"
      R"("timeline":{"enabled":false,"output_path":"timeline","start_step":2,"steps":10,"operators":true},"record":null},)"
      R"("pipeline":{"stages":1,"partition":"best","activation_checkpoint_interval":0},"checkpoint":{"tag_validation":"Warn","keep_last":0,"async_save":false,"verify":"while_reading"},)"
      R"("wall_clock_breakdown":false,"memory_breakdown":false,"dump_state":false,"comms_logger":{"enabled":false,)"
      R"("verbose":false,"prof_all":true,"debug":false,"prof_ops":[]},"sequence_parallel_size":1,"deterministic":false,)"
      R"("steps_per_print":0,"tensor_parallel":{"autotp_size":0,"preset_model":null,"partition_config":null,)"
      R"("tp":{"tp_grain_size":1},"sequence_parallel":false,"tp_overlap_comm":false},)"
      R"("flops_profiler":{"enabled":false,"recompute_fwd_factor":0.0,"profile_step":1,"module_depth":-1,)"
      R"("top_modules":1,"detailed":true,"output_file":null},)"
      R"("tensorboard":{"enabled":false,"output_path":"","job_name":"DeepSpeedJobName"},)"
      R"("csv_monitor":{"enabled":false,"output_path":"","job_name":"DeepSpeedJobName"},)"
      R"("wandb":{"enabled":false,"project":"deepspeed"},"comet":{"enabled":false,"samples_log_interval":100}})");
}

TEST(Config, ReadsAFileAndNamesItInErrors) {
  const testing::TemporaryFolder folder;
  const auto path = folder / "a.json";
  std::ofstream(path) << "{ # two ranks\n \"train_batch_size\": 4 }";
  EXPECT_EQ(read_config(path, 2).batch.train_micro_batch_size_per_gpu, 2);
  std::ofstream(path) << "{\"train_batch_size\": 4, \"gradient_clippin\": 1}";
  try {
    read_config(path, 2);
    ADD_FAILURE() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.what(), path.string() + ":1: unknown key `gradient_clippin`. Did you mean `gradient_clipping`?");
  }
}

TEST(Config, OfAFileThatIsNotThereSaysHowToWriteOne) {
  const auto refusal = [](const std::filesystem::path& path) {
    try {
      read_config(path, 2);
    } catch (const IoError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const std::string start = "open for reading failed: No such file or directory; give the path of a configuration";
  const std::string fix =
      ": DeepSpeed's JSON, such as {\"train_micro_batch_size_per_gpu\": 1}, or Accelerate's YAML; `trireme docs "
      "config` has the keys";
  EXPECT_EQ(refusal("/nowhere/ds.json"), "/nowhere/ds.json: " + start + fix);
  EXPECT_EQ(refusal("nowhere.json"),
            "nowhere.json: " + start + ", from " + std::filesystem::current_path().string() + fix);
}

TEST(Config, RefusesAFileThatIsNoObject) {
  EXPECT_EQ(refusal_of_text("[1]"), wrong("the whole file is [1]; expected an object { … }"));
}

TEST(Config, ReadsGradientClipping) {
  EXPECT_EQ(read_with("\"gradient_clipping\": 0").gradient_clipping, 0);
  EXPECT_EQ(read_with("\"gradient_clipping\": 2.5").gradient_clipping, 2.5);
  EXPECT_EQ(read_with("\"gradient_clipping\": \"auto\"").gradient_clipping, 1.0);
  EXPECT_EQ(refusal_of("\"gradient_clipping\": -1"), wrong("`gradient_clipping` is -1; expected a finite number >= 0"));
}

TEST(Config, NeverPrintsWhenStepsPerPrintIsInfinite) {
  for (const char* never :
       {"1e999", "\"inf\"", "\"Infinity\"", "Infinity", "1e30", "9223372036854775807", "null", "0", "\"auto\""})
    EXPECT_EQ(read_with(std::string("\"steps_per_print\": ") + never).steps_per_print, 0) << never;
  EXPECT_EQ(read_with("\"steps_per_print\": 10").steps_per_print, 10);
  EXPECT_EQ(refusal_of("\"steps_per_print\": -1"),
            wrong("`steps_per_print` is -1; expected an integer >= 0 (0 or an infinity: never)"));
  EXPECT_EQ(refusal_of("\"steps_per_print\": \"often\""),
            wrong("`steps_per_print` is \"often\"; expected an integer >= 0 (0 or an infinity: never)"));
}

TEST(Config, Takes0And1WhereABooleanStands) {
  const Config config = read_with(
      R"("bf16": {"enabled": 1, "check_grad_overflow": 0}, "zero_optimization": {"stage": 3, "overlap_comm": 1,
      "ignore_unused_parameters": 0}, "amp": {"enabled": 0}, "curriculum_learning": 0, "compression_training": {"layer_reduction": {"enabled": 0}},
      "wall_clock_breakdown": 0, "deterministic": 1)");
  EXPECT_EQ(config.precision.weight_dtype, at::kBFloat16);
  EXPECT_FALSE(config.ignore_unused_parameters);
  EXPECT_EQ(config,
            read_with(R"("bf16": {"enabled": true, "check_grad_overflow": false}, "zero_optimization": {"stage": 3,
      "ignore_unused_parameters": false}, "deterministic": true)"));
  EXPECT_EQ(refusal_of("\"graph_harvesting\": 1").code, ErrorCode::kUnsupported);
  EXPECT_EQ(refusal_of("\"deterministic\": 2"), wrong("`deterministic` is 2; expected true or false"));
}

TEST(Config, ReadsHjson) {
  const testing::TemporaryFolder folder;
  const auto path = folder / "a.hjson";
  std::ofstream(path) << "train_batch_size: 8\nzero_optimization: {\n  stage: 2,\n}\n";
  EXPECT_EQ(read_config(path, 4), parse_config(R"({"train_batch_size": 8, "zero_optimization": {"stage": 2}})", 4));
}

TEST(Config, KnowsWhatOthersCallAKey) {
  EXPECT_EQ(refusal_of(R"("optimizer": {"type": "AdamW", "params": {"learning_rate": 0.1}})"),
            wrong("unknown key `optimizer.params.learning_rate`. Did you mean `lr`?"));
  EXPECT_EQ(refusal_of("\"micro_batch_size\": 2"),
            wrong("unknown key `micro_batch_size`. Did you mean `train_micro_batch_size_per_gpu`?"));
  EXPECT_EQ(refusal_of("\"learning_rate\": 0.1"),
            wrong("unknown key `learning_rate`. Remove it; `trireme docs config` lists all keys."));
}

TEST(Config, NamesUnknownKeys) {
  EXPECT_EQ(refusal_of("\"zero_optimisation\": {}"),
            wrong("unknown key `zero_optimisation`. Did you mean `zero_optimization`?"));
  EXPECT_EQ(refusal_of("\"qwertyuiop\": 1"),
            wrong("unknown key `qwertyuiop`. Remove it; `trireme docs config` lists all keys."));
  EXPECT_EQ(refusal_of("\"tensorboard\": {\"enabeld\": false}"),
            wrong("unknown key `tensorboard.enabeld`. Did you mean `enabled`?"));
}

TEST(Config, RefusesDuplicateKeys) {
  EXPECT_EQ(refusal_of("\"bf16\": {\"enabled\": true, \"enabled\": false}"),
            wrong("the key `bf16.enabled` stands twice; remove one of the two"));
}

TEST(Config, ReadsMonitors) {
  const Config config = read_with(
      R"("tensorboard": {"enabled": true, "output_path": "logs", "job_name": "a"}, "csv_monitor": {"enabled": 1},
         "wandb": {"enabled": true, "group": "g", "team": "t", "project": "p"},
         "comet": {"enabled": true, "samples_log_interval": 5, "api_key": "secret", "online": false, "mode": "get"})");
  const MonitorOptions& monitors = config.monitors;
  EXPECT_EQ(monitors.tensorboard, (FileMonitorOptions{.enabled = true, .output_path = "logs", .job_name = "a"}));
  EXPECT_EQ(monitors.csv_monitor, FileMonitorOptions{.enabled = true});
  EXPECT_EQ(monitors.wandb, (WandbOptions{.enabled = true, .group = "g", .team = "t", .project = "p"}));
  EXPECT_EQ(
      monitors.comet,
      (CometOptions{.enabled = true, .samples_log_interval = 5, .api_key = "secret", .online = false, .mode = "get"}));
  EXPECT_TRUE(monitors.is_on() && monitors.needs_python());
  EXPECT_FALSE(read_with("\"wandb\": {\"team\": \"t\"}").monitors.is_on());
  EXPECT_EQ(to_text(config).find("secret"), std::string::npos) << "resolved_config.json is a file that people share";
}

TEST(Config, RefusesMonitorsOfOtherKeysAndValues) {
  EXPECT_EQ(refusal_of(R"("csv_monitor": {"output": "a"})"),
            wrong("unknown key `csv_monitor.output`. Did you mean `output_path`?"));
  EXPECT_EQ(refusal_of(R"("wandb": {"enabled": true, "entity": "a"})"),
            wrong("unknown key `wandb.entity`. Remove it; `trireme docs config` lists all keys."));
  EXPECT_EQ(refusal_of(R"("tensorboard": {"output_path": 3})"),
            wrong("`tensorboard.output_path` is 3; expected a string"));
  EXPECT_EQ(refusal_of(R"("comet": {"mode": "new"})"),
            wrong("`comet.mode` is \"new\"; expected one of \"get\", \"create\", \"get_or_create\"."));
}

TEST(Config, ReadsTagValidation) {
  EXPECT_EQ(read_with(R"("checkpoint": {"tag_validation": "Fail", "load_universal": false})").checkpoint.tag_validation,
            TagValidation::kFail);
}

TEST(Config, ReadsHowCheckpointsAreSavedAndLoaded) {
  const CheckpointOptions options =
      read_with(R"("checkpoint": {"keep_last": 2, "async_save": true, "verify": "full"})").checkpoint;
  EXPECT_EQ(options, (CheckpointOptions{.keep_last = 2, .async_save = true, .verify = Verify::kFirst}));
  EXPECT_TRUE(read_with(R"("checkpoint": {"writer": {"type": "FAST", "decoupled": true}})").checkpoint.async_save);
  EXPECT_EQ(refusal_of(R"("checkpoint": {"keep_last": -1})"),
            wrong("`checkpoint.keep_last` is -1; expected a number of checkpoints from 0 (all) to 1000000"));
  EXPECT_EQ(refusal_of(R"("checkpoint": {"verify": "none"})"),
            wrong("`checkpoint.verify` is \"none\"; expected one of \"while_reading\", \"full\"."));
}

TEST(Config, SaysThatAnyCheckpointIsUniversal) {
  CapturedLog log;
  read_with(R"("checkpoint": {"load_universal": true})");
  EXPECT_NE(log.text().find("`checkpoint.load_universal`: every checkpoint loads at any number of ranks"),
            std::string::npos)
      << log.text();
}

TEST(Config, TakesADataParallelSizeThatIsTheWorld) {
  EXPECT_EQ(read_with("\"data_parallel_size\": 3", 3).batch.train_batch_size, 3);
  EXPECT_EQ(refusal_of("\"data_parallel_size\": 2", 4),
            not_there("`data_parallel_size` = 2 is not there yet; all 4 ranks are data-parallel; remove it"));
}

TEST(KnownSections, AreAcceptedQuietlyWhenTheyAreOff) {
  CapturedLog log;
  read_with(
      R"("fp16": {"enabled": false, "loss_scale": 128, "initial_scale_power": 8}, "amp": {"enabled": false, "opt_level": "O1"},
               "torch_autocast": {"enabled": false, "dtype": "bfloat16"}, "tensorboard": {"enabled": false, "output_path": "x"},
               "wandb": {"enabled": false, "team": "t"}, "flops_profiler": {"enabled": false, "profile_step": 5},
               "activation_checkpointing": {"partition_activations": false, "number_checkpoints": null},
               "tensor_parallel": {"autotp_size": 0, "dtype": "bf16", "tp": {"tp_size": 1}}, "compile": {"deepcompile": false},
               "elasticity": {"enabled": false}, "autotuning": {"enabled": false, "metric": "latency"},
               "data_efficiency": {"enabled": false, "data_sampling": {"enabled": true}}, "pipeline": {"stages": "auto"},
               "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": false}}},
               "hybrid_engine": {"enabled": "auto", "max_out_tokens": 512}, "nebula": {"enabled": null, "version": 1},
               "sparse_attention": "auto", "eigenvalue": {}, "weight_quantization": {"shared": {"enabled": "auto"}}, "wall_clock_breakdown": false, "prescale_gradients": false,
               "gradient_predivide_factor": 1, "gradient_allreduce_op": "mean", "managed_gradient_accumulation": true)");
  EXPECT_EQ(log.text(), "");
}

TEST(KnownSections, AreRefusedByNameWhenTheyAreOn) {
  const struct {
    const char* keys;
    const char* message;
  } cases[] = {
      {R"("fp16": {"fp16_master_weights_and_grads": true})",
       "`fp16.fp16_master_weights_and_grads` = true is not there yet; masters and optimizer states are fp32; remove it "
       "or set it to false"},
      {R"("elasticity": {"enabled": true})",
       "`elasticity.enabled` = true is not there yet; remove it or set it to false"},
      {R"("progressive_layer_drop": {"enabled": true})",
       "`progressive_layer_drop.enabled` = true is not there yet; remove it or set it to false"},
      {R"("tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}}, "sparse_gradients": true)",
       "`sparse_gradients` = true is not there yet; remove it or set it to false"},
      {R"("compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}})",
       "`compression_training` = {\"weight_quantization\":{\"shared_parameters\":{\"enabled\":true}}} is not there "
       "yet; remove "
       "it or set its \"enabled\" to false"},
      {R"("curriculum_learning": {"min_difficulty": 8})",
       "`curriculum_learning` = {\"min_difficulty\":8} is not there yet; remove it or set its \"enabled\" to false"},
      {R"("fp32_allreduce": true)", "`fp32_allreduce` = true is not there yet; remove it or set it to false"}};
  for (const auto& [keys, message] : cases) EXPECT_EQ(refusal_of(keys), not_there(message));
}

TEST(KnownSections, CheckTypesEvenWhenTheyAreOff) {
  EXPECT_EQ(refusal_of(R"("fp16": {"enabled": "yes"})"), wrong("`fp16.enabled` is \"yes\"; expected true or false"));
  EXPECT_EQ(refusal_of(R"("comms_logger": {"prof_ops": "all"})"),
            wrong("`comms_logger.prof_ops` is \"all\"; expected a list of strings"));
  EXPECT_EQ(
      refusal_of(R"("comms_logger": {"prof_all": false, "prof_ops": ["all_gather_into_tensor", "allreduce"]})"),
      wrong("`comms_logger.prof_ops` has \"allreduce\", which is no operation, so nothing would be counted for it. "
            "Did you mean `all_reduce`? There are \"all_reduce\", \"reduce_scatter\", \"all_gather\", "
            "\"broadcast\", \"all_to_all\", \"gather\", \"scatter\", \"reduce\", \"barrier\", \"send\", \"recv\", "
            "\"share\", \"split\", and torch.distributed's forms of these, as \"all_gather_into_tensor\"; a call "
            "that has a `log_name` is counted by its operation"));
  EXPECT_EQ(refusal_of("\"gradient_allreduce_op\": \"max\""),
            wrong("`gradient_allreduce_op` is \"max\"; expected one of \"mean\", \"sum\"."));
  EXPECT_EQ(refusal_of("\"tensorboard\": true"), wrong("`tensorboard` is true; expected an object { … }"));
}

TEST(KnownSections, WithFreeKeysRefuseASwitchThatIsNoSwitch) {
  EXPECT_EQ(refusal_of(R"("amp": {"enabled": "yes"})"), wrong("`amp.enabled` is \"yes\"; expected true or false"));
  EXPECT_EQ(refusal_of(R"("amp": {"enabled": 2})"), wrong("`amp.enabled` is 2; expected true or false"));
  EXPECT_EQ(refusal_of(R"("compression_training": {"weight_quantization": {"enabled": "yes"}})").code,
            ErrorCode::kUnsupported);
}

TEST(Config, TellsEveryMistakeAtOnce) {
  const auto refusal = refusal_of(R"("optimizer": {"type": "AdamW", "params": {"beta": 1}},
                                     "zero_optimization": {"stgae": 1}, "fp61": {})");
  for (const char* part : {"`beta`", "`zero_optimization.stgae`", "`fp61`"})
    EXPECT_NE(refusal.message.find(std::string(part).substr(1)), std::string::npos) << refusal.message;
  EXPECT_EQ(std::count(refusal.message.begin(), refusal.message.end(), '\n'), 2) << refusal.message;
}

TEST(Config, TellsTheLinesOfAFile) {
  try {
    parse_config("{\"train_micro_batch_size_per_gpu\": 1,\n\"zero_optimization\": {\n\"stage\": 4},\n\"bf61\": {}}", 1,
                 {}, "ds.json");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "ds.json:3: `zero_optimization.stage` is 4; expected an integer from 0 to 3\n"
                 "ds.json:4: unknown key `bf61`. Did you mean `bf16`?");
  }
}

TEST(Config, NamesTheSectionInWhichAnUnknownKeyStands) {
  EXPECT_EQ(refusal_of(R"("overlap_comm": true)").message,
            "unknown key `overlap_comm`. Did you mean `zero_optimization.overlap_comm`?");
  EXPECT_EQ(refusal_of(R"("max_grad_norm": 1)").message,
            "unknown key `max_grad_norm`. Did you mean `gradient_clipping`?");
  EXPECT_EQ(refusal_of(R"("per_device_train_batch_size": 1)").message,
            "unknown key `per_device_train_batch_size`. Did you mean `train_micro_batch_size_per_gpu`?");
}

TEST(Config, AsksForASwitchWithoutQuotes) {
  EXPECT_EQ(refusal_of(R"("bf16": {"enabled": "true"})").message,
            "`bf16.enabled` is \"true\"; expected true or false; write it without quotes");
}

TEST(Config, NamesArgumentsOfTheTrainerAsThat) {
  try {
    parse_config(R"({"output_dir": "out", "per_device_train_batch_size": 4, "learning_rate": 5e-5})", 1, {}, "t.json");
    FAIL();
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    EXPECT_TRUE(text.starts_with("t.json: `output_dir` is of transformers' TrainingArguments")) << text;
    EXPECT_NE(text.find("train_micro_batch_size_per_gpu for per_device_train_batch_size"), std::string::npos) << text;
  }
}

TEST(KnownSections, WithoutMeaningAreNamedInTheInfoLine) {
  CapturedLog log;
  read_with(R"("zero_allow_untested_optimizer": true, "timers": {"throughput": {"enabled": false}})");
  EXPECT_EQ(log.text(),
            "info <string>: ignored, because Trireme does not need them (`trireme docs config` says why): "
            "`zero_allow_untested_optimizer`, "
            "`timers.throughput.enabled`\n");
}

TEST(KnownSections, UseReentrantHasAMeaningWhateverItIs) {
  for (const char* value : {"true", "false"}) {
    CapturedLog log;
    read_with(str(R"("pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": )", value, "}"));
    EXPECT_EQ(log.text(), "");
  }
  EXPECT_EQ(refusal_of(R"("pipeline": {"use_reentrant": 2})"),
            wrong("`pipeline.use_reentrant` is 2; expected true or false"));
}

TEST(Precision, IsFp32ByDefaultWithFp32Accumulation) {
  const Config config = read_with("\"bf16\": {}");
  EXPECT_EQ(config.precision.weight_dtype, at::kFloat);
  EXPECT_EQ(config.pager.accumulation_dtype, at::kFloat);
}

TEST(Precision, AccumulatesBf16GradientsInFp32UnlessToldOtherwise) {
  const Config config = read_with("\"bf16\": {\"enabled\": true}");
  EXPECT_EQ(config.precision.weight_dtype, at::kBFloat16);
  EXPECT_EQ(config.precision.accumulation_dtype, at::kFloat);
  const Config narrow = read_with(R"("bfloat16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"})");
  EXPECT_EQ(narrow.precision.accumulation_dtype, at::kBFloat16);
  EXPECT_EQ(narrow.pager.accumulation_dtype, at::kBFloat16);
}

TEST(Precision, RefusesDtypesThatDoNotFit) {
  EXPECT_EQ(refusal_of(R"("data_types": {"grad_accum_dtype": "bf16"})"),
            wrong("`data_types.grad_accum_dtype` is \"bf16\"; expected \"fp32\", or bf16.enabled = true for \"bf16\""));
  EXPECT_EQ(refusal_of(R"("bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"})"),
            wrong("`data_types.grad_accum_dtype` is \"fp16\"; expected \"fp32\" or \"bf16\""));
  EXPECT_EQ(refusal_of(R"("bf16": {"enabled": true}, "data_types": {"param_dtype": "fp32"})"),
            wrong("`data_types.param_dtype` is \"fp32\"; expected \"bf16\", the dtype that bf16.enabled chooses"));
  EXPECT_EQ(refusal_of("\"communication_data_type\": \"int8\""),
            wrong("`communication_data_type` is \"int8\"; expected one of \"fp32\", \"bf16\", \"fp16\"."));
}

constexpr const char* kBothInBf16 = R"("bf16_master_weights_and_grads": true, "bf16_optimizer_states": true)";

TEST(Precision, UpdatesInBf16WhereBothKeysSaySo) {
  const Config config = read_with(str(R"("bf16": {"enabled": true, )", kBothInBf16, "}"));
  EXPECT_EQ(config.precision.update_dtype, at::kBFloat16);
  EXPECT_FALSE(config.precision.stochastic_rounding);
  EXPECT_EQ(config.precision.accumulation_dtype, at::kBFloat16);
  EXPECT_EQ(config.pager.accumulation_dtype, at::kBFloat16);
  EXPECT_EQ(parse_config(to_text(config), 1).precision, config.precision);
  EXPECT_EQ(read_with(R"("bf16": {"enabled": true})").precision.update_dtype, at::kFloat);
}

TEST(Precision, RoundsStochasticallyWhereUpdatesAreInBf16) {
  const std::string rounds = R"("trireme": {"stochastic_rounding": true})";
  const Config config = read_with(str(R"("bf16": {"enabled": true, )", kBothInBf16, "}, ", rounds));
  EXPECT_TRUE(config.precision.stochastic_rounding);
  EXPECT_EQ(parse_config(to_text(config), 1).precision, config.precision);
  EXPECT_EQ(refusal_of(str(R"("bf16": {"enabled": true}, )", rounds)),
            wrong("`trireme.stochastic_rounding` = true is for updates in bf16; set "
                  "`bf16.bf16_master_weights_and_grads` and `bf16.bf16_optimizer_states` to true, or remove it"));
}

TEST(Precision, RefusesOneOfTheKeysAloneAndWhatDoesNotGoWithThem) {
  EXPECT_EQ(refusal_of(R"("bf16": {"enabled": true, "bf16_optimizer_states": true})"),
            wrong("`bf16.bf16_optimizer_states` = true needs `bf16.bf16_master_weights_and_grads` = true, as in "
                  "DeepSpeed; set both, or neither"));
  EXPECT_EQ(refusal_of(R"("bf16": {"enabled": true, "bf16_master_weights_and_grads": true})"),
            not_there("`bf16.bf16_master_weights_and_grads` = true is not there yet; states in fp32 beside weights "
                      "without masters; set `bf16.bf16_optimizer_states` to true too, or remove it"));
  EXPECT_EQ(refusal_of(str("\"bf16\": {", kBothInBf16, "}")),
            wrong("`bf16.bf16_master_weights_and_grads` = true is for weights in bf16; set `bf16.enabled` to true"));
  EXPECT_EQ(
      refusal_of(str(R"("data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": true, )", kBothInBf16, "}")),
      wrong("`bf16.bf16_master_weights_and_grads` = true sums gradients in bf16; set "
            "`data_types.grad_accum_dtype` to \"bf16\", or remove it"));
}

TEST(Precision, TakesEitherSpellingOfBf16ButNotBoth) {
  EXPECT_EQ(refusal_of(R"("bf16": {}, "bfloat16": {})"),
            wrong("`bfloat16` and `bf16` are two spellings of one key; keep `bf16`"));
  EXPECT_EQ(refusal_of(R"("bfloat16": {"enabled": 2})"), wrong("`bfloat16.enabled` is 2; expected true or false"));
}

}  // namespace
}  // namespace trireme
