#include "config/known_keys.h"

#include <algorithm>
#include <array>
#include <utility>

namespace trireme {
namespace {

// The tables give each key with DeepSpeed's default. A value must be of the default's type (null: of any); a number
// must not be negative unless the default is; "a|b" means a, or b, with a the default.

// Nothing happens whatever their value: what they tune works in another way here. docs/config.md says how for each.
constexpr const char* kWithoutMeaning = R"({
  "zero_allow_untested_optimizer": false,
  "zero_force_ds_cpu_optimizer": true,
  "seq_parallel_communication_data_type": "fp32|fp16|bf16",
  "dataloader_drop_last": false,
  "vocabulary_size": null,
  "log_level": null,
  "timers": {"throughput": {"enabled": true, "synchronized": true}},
  "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "thread_count": 1, "single_submit": false,
          "overlap_events": true, "use_gds": false}
})";

constexpr const char* kZeroWithoutMeaning = R"({
  "contiguous_gradients": true,
  "reduce_scatter": true,
  "reduce_bucket_size": 500000000,
  "use_multi_rank_bucket_allreduce": true,
  "allgather_partitions": true,
  "allgather_bucket_size": 500000000,
  "overlap_comm": false,
  "load_from_fp32_weights": true,
  "round_robin_gradients": false,
  "memory_efficient_linear": true,
  "override_module_apply": true,
  "pipeline_loading_checkpoint": false,
  "log_trace_cache_warnings": false,
  "enable_sanity_checks": false,
  "sub_group_size": 1000000000,
  "stage3_param_persistence_threshold": 100000,
  "stage3_model_persistence_threshold": 9223372036854775807,
  "stage3_max_reuse_distance": 1000000000,
  "stage3_gather_16bit_weights_on_model_save": false,
  "stage3_module_granularity_threshold": 0,
  "stage3_use_all_reduce_for_fetch_params": false,
  "stage3_allgather_sequential": false
})";

// Refused when they differ from the default. In a section with a switch (switch_of) only that key counts.
constexpr const char* kNotThereYet = R"({
  "fp32_allreduce": false,
  "sparse_gradients": false,
  "disable_allgather": false,
  "dump_state": false,
  "wall_clock_breakdown": false,
  "memory_breakdown": false,
  "graph_harvesting": false,
  "use_data_before_expert_parallelism": false,
  "sequence_parallel_size": 1,
  "tensor_parallel": {"autotp_size": 0, "dtype": null, "tp_overlap_comm": false,
                      "tp": {"tp_size": 1, "tp_grain_size": 1, "mpu": null, "tp_group": null}, "partition_config": null,
                      "preset_model": null, "keep_module_on_host": false, "kernel_inject": false,
                      "injection_policy_tuple": null},
  "compile": {"deepcompile": false, "passes": null, "free_activation": false, "free_activation_threshold": 10485760,
              "offload_activation": false, "offload_activation_pin_memory": true, "offload_opt_states": false,
              "offload_parameters": false, "double_buffer": true, "symmetric_memory": false, "debug_log": false,
              "sync_before_reduce": false, "sync_after_reduce": false, "sync_before_allgather": false,
              "sync_after_allgather": false, "keep_int_input_tensors": true, "keep_all_input_tensors": false},
  "pipeline": {"stages": null, "partition": "best", "seed_layers": false, "activation_checkpoint_interval": 0,
               "pipe_partitioned": true, "grad_partitioned": true, "use_reentrant": true},
  "tensorboard": {"enabled": false, "output_path": "", "job_name": ""},
  "csv_monitor": {"enabled": false, "output_path": "", "job_name": ""},
  "wandb": {"enabled": false, "group": null, "team": null, "project": "deepspeed"},
  "comet": {"enabled": false, "samples_log_interval": 100, "project": null, "workspace": null, "api_key": null,
            "experiment_name": null, "experiment_key": null, "online": null, "mode": null},
  "flops_profiler": {"enabled": false, "recompute_fwd_factor": 0.0, "profile_step": 1, "module_depth": -1,
                     "top_modules": 1, "detailed": true, "output_file": null},
  "comms_logger": {"enabled": false, "verbose": false, "prof_all": true, "debug": false, "prof_ops": []},
  "elasticity": {"enabled": false, "max_train_batch_size": null, "micro_batch_sizes": null, "min_gpus": 1,
                 "max_gpus": 10000, "num_gpus_per_node": 1, "model_parallel_size": 1, "min_time": 0,
                 "prefer_larger_batch": true, "ignore_non_elastic_batch_info": false, "version": 0.2},
  "progressive_layer_drop": {"enabled": false, "theta": 1.0, "gamma": 0.001}
})";

constexpr const char* kZeroNotThereYet = R"({
  "elastic_checkpoint": false,
  "legacy_stage1": false,
  "zero_hpz_partition_size": 1,
  "zero_quantized_weights": false,
  "zero_quantized_nontrainable_weights": false,
  "zero_quantized_gradients": false,
  "zeropp_loco_param": null,
  "mics_shard_size": -1,
  "mics_hierarchical_params_gather": false,
  "save_muon_momentum_buffer_in_memory": false,
  "zenflow": null
})";

// Sections of many or free keys: on when one of their `enabled` is true, or when they have content and no `enabled` at
// all.
constexpr std::array kOpenSections = {"amp",
                                      "autotuning",
                                      "hybrid_engine",
                                      "data_efficiency",
                                      "curriculum_learning",
                                      "expert_parallel",
                                      "compression_training",
                                      "weight_quantization",
                                      "nebula",
                                      "datastates_ckpt",
                                      "eigenvalue",
                                      "sparse_attention"};

std::vector<std::string> alternatives(const std::string& text) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == '|') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string fix_for(const Json& normal) {
  return normal.is_null() ? "remove it" : "remove it or set it to " + normal.dump();
}

/// Reads `key` as a value of the type of its default. Returns whether it differs from the default.
bool differs(Section& section, const std::string& key, Json& normal) {
  if (normal.is_boolean()) return section.flag_or(key, normal) != normal.get<bool>();
  if (normal.is_number()) {
    const double number = normal;
    const NumberRange range = number < 0 ? NumberRange{} : NumberRange{.min = 0, .words = "a number >= 0"};
    return section.number_or(key, number, range) != number;
  }
  if (normal.is_array()) return section.texts_or(key, normal) != normal.get<std::vector<std::string>>();
  if (!normal.is_string()) return section.has(key);
  const auto choices = alternatives(normal);
  normal = choices[0];
  const std::string text =
      choices.size() == 1 ? section.text_or(key, choices[0]) : section.choice_or(key, choices[0], choices);
  return text != choices[0];
}

/// The key that switches a section on, or "" when every key counts.
std::string switch_of(const Json& defaults) {
  for (const char* key : {"enabled", "autotp_size", "deepcompile"})
    if (defaults.contains(key)) return key;
  return "";
}

enum class Treatment { kWithoutMeaning, kNotThereYet };

void read_keys(Section& section, const Json& defaults, Treatment treatment) {
  const std::string switch_key = switch_of(defaults);
  for (const auto& item : defaults.items()) {
    const std::string& key = item.key();
    Json normal = item.value();
    if (normal.is_object()) {
      Section inner = section.section(key);
      read_keys(inner, normal, treatment);
      inner.finish();
      continue;
    }
    const bool different = differs(section, key, normal);
    const bool counts = switch_key.empty() || switch_key == key;
    if (treatment == Treatment::kNotThereYet && different && counts) section.not_there_yet(key, fix_for(normal));
    if (treatment == Treatment::kWithoutMeaning && section.has(key)) section.without_meaning(key);
  }
}

bool reads_as_off(const Json& answer) { return answer.is_null() || answer == false || answer == 0 || answer == "auto"; }

bool mentions_enabled(const Json& json) {
  if (json.is_object() && json.contains("enabled")) return true;
  return json.is_structured() && std::any_of(json.begin(), json.end(), mentions_enabled);
}

bool some_is_enabled(const Json& json) {
  if (json.is_object() && json.contains("enabled") && !reads_as_off(json["enabled"])) return true;
  return json.is_structured() && std::any_of(json.begin(), json.end(), some_is_enabled);
}

/// Whether the open section `key` does anything.
bool is_on(Section& top, const char* key) {
  const Json* json = top.value(key);
  if (!json || json->empty() || *json == false || *json == 0) return false;
  if (json->is_object() && json->contains("enabled")) return top.section(key).flag_or("enabled", false);
  return some_is_enabled(*json) || !mentions_enabled(*json);
}

void read_open_sections(Section& top) {
  for (const char* key : kOpenSections) {
    if (is_on(top, key)) top.not_there_yet(key, R"(remove it or set its "enabled" to false)");
  }
}

}  // namespace

void read_known_keys(Section& top) {
  read_keys(top, Json::parse(kWithoutMeaning), Treatment::kWithoutMeaning);
  read_keys(top, Json::parse(kNotThereYet), Treatment::kNotThereYet);
  read_open_sections(top);
}

void read_without_meaning(Section& section, const char* defaults) {
  read_keys(section, Json::parse(defaults), Treatment::kWithoutMeaning);
}

void read_known_zero_keys(Section& zero) {
  read_keys(zero, Json::parse(kZeroWithoutMeaning), Treatment::kWithoutMeaning);
  read_keys(zero, Json::parse(kZeroNotThereYet), Treatment::kNotThereYet);
  const int64_t bucket = zero.integer_or("allgather_bucket_size", 0, kCount);
  if (bucket % 2 != 0) zero.fail("allgather_bucket_size", "an even integer");
}

}  // namespace trireme
