// Everything that several keys decide together.
#include <c10/core/ScalarType.h>

#include <algorithm>

#include "config/document/keys.h"
#include "config/options.h"
#include "trireme/base/name_pattern.h"
#include "trireme/base/pattern.h"
#include "trireme/observe/comms_log.h"
#include "trireme/parallel/exclusions.h"
#include "trireme/parallel/plan.h"

namespace trireme {
namespace {

constexpr IntegerRange kTensorRanks = {
    .min = 0, .max = std::numeric_limits<int32_t>::max(), .words = "an integer from 0 to 2147483647"};
constexpr double kForwardOfStep = 1.0 / 3;  // of the multiply-adds of forward and backward
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// --- old and short forms -------------------------------------------------------------------------------------------

void warn_deprecated(Document& file, const std::string& name, const std::string& path) {
  file.warnings.push_back(
      str(file.origin(), ": `", file.path_of(name), "` is deprecated; write `", file.path_of(path), "`"));
}

void rename_aliases(Document& file) {
  for (const Alias& alias : aliases())
    file.attempt([&] {
      if (alias.is_deprecated && file.has(alias.name)) warn_deprecated(file, alias.name, alias.path);
      file.rename(alias.name, alias.path);
    });
}

/// `true` is the old way to say ZeRO stage 1.
void take_stage_as_flag(Document& file) {
  const Json* zero = file.find("zero_optimization");
  if (!zero || !zero->is_boolean()) return;
  const int stage = zero->get<bool>() ? 1 : 0;
  file.warnings.push_back(
      str(file.origin(), ": `zero_optimization` = ", zero->dump(), R"( is deprecated; write {"stage": )", stage, "}"));
  file.replace("zero_optimization", {{"stage", stage}});
}

/// A text is the mode; an object without a mode tunes the selective one.
void take_recompute_as_text(Document& file) {
  const std::string key = "trireme.recompute";
  const Json* json = file.find(key);
  if (!json || (json->is_object() && json->contains("mode"))) return;
  if (!json->is_object()) {
    file.call(key + ".mode", key);
    return file.replace(key, {{"mode", *json}});
  }
  Json object = *json;
  object["mode"] = "selective";
  file.replace(key, std::move(object));
}

// --- the grid ------------------------------------------------------------------------------------------------------

/// The replicas that MiCS and hpZ make of the data-parallel ranks.
void resolve_replicas(Document& file, Config& config) {
  const std::string mics = "zero_optimization.mics_shard_size", hpz = "zero_optimization.zero_hpz_partition_size";
  const int64_t mics_size = file.integer_or(mics, -1, kShardSize);
  const int64_t hpz_size = file.integer_or(hpz, 1, kPositive);
  Degrees& degrees = config.degrees;
  if (mics_size == 0) file.fail(mics, kShardSize.words);
  if (mics_size > 0 && hpz_size > 1)
    file.refuse(hpz, str("`", hpz, "` = ", hpz_size, " and `", mics, "` = ", mics_size, "; remove one of the two"));
  const bool is_hpz = hpz_size > 1;
  const bool is_given = is_hpz || mics_size > 0;
  const std::string key = is_hpz ? hpz : is_given ? mics : "";
  const int64_t size = is_hpz ? hpz_size : is_given ? mics_size : degrees.data / degrees.replicas;
  const std::string said = is_given ? str("`", key, "` = ", size) : str("degrees.replicas=", degrees.replicas);
  if (is_given && degrees.data % size != 0)
    file.refuse(key, str(said, " does not divide the ", degrees.data,
                         " data-parallel ranks; choose a divisor, or another number of ranks"));
  const auto replicas = static_cast<int>(degrees.data / size);
  if (degrees.replicas != 1 && degrees.replicas != replicas)
    file.refuse(key, str(said, " makes ", replicas, " replicas, and the program has ", degrees.replicas,
                         "; remove the key, or let them agree"));
  degrees.replicas = replicas;
  if (is_given && config.pager.stage < (is_hpz ? 3 : 1))
    file.refuse(key, str(said, " at ZeRO stage ", config.pager.stage, "; set `zero_optimization.stage` to ",
                         is_hpz ? "3" : "1, 2 or 3", ", or remove the key"));
  if (replicas == 1) return;
  config.states_over_replicas |= is_hpz;
  if (const AxisExclusion* row = first_exclusion(replica_axis(), parallel_options(config)); row != nullptr)
    file.refuse(key, filled(row->text, {said, str(replicas)}), row->code);
}

void check_sums(const Document& file) {
  const std::string overlap = "tensor_parallel.tp_overlap_comm", tokens = "tensor_parallel.sequence_parallel";
  if (file.flag_or(overlap, false) && file.flag_or(tokens, false))
    file.refuse(overlap, str("`", overlap, "` overlaps all-reduces, and with `", tokens,
                             "` sums are reduce-scatters; remove one of the two"));
}

void check_prof_ops(const Document& file, const CommsLoggerOptions& comms_logger) {
  const std::string key = "comms_logger.prof_ops";
  try {
    check_operations(comms_logger, file.path_of(key));
  } catch (const ConfigError& error) {
    file.refuse(key, error.what());
  }
}

/// DeepCompile's pass "autosp": samples are cut over all ranks that `data_parallel_size` leaves, unless
/// `sequence_parallel_size` says over how many, and products are computed again in backward.
void take_autosp(Document& file, Config& config, int world_size) {
  if (!file.flag_or("compile.deepcompile", false)) return;
  const Json* passes = file.find("compile.passes");
  if (passes == nullptr || *passes != Json::array({"autosp"}))
    file.not_there_yet("compile.deepcompile", R"(set "passes" to ["autosp"] beside it, or remove it)");
  Degrees& degrees = config.degrees;
  const auto samples = static_cast<int>(file.integer_or("data_parallel_size", 1, kPositive));
  if (degrees.sequence == 1 && !file.has("sequence_parallel_size"))
    degrees.sequence = std::max(1, world_size / (degrees.pipe * degrees.tensor * degrees.model * samples));
  if (!file.has("trireme.recompute"))
    config.recompute = {.mode = RecomputeMode::kSelective, .selective = {.extra_compute = kForwardOfStep}};
}

/// The ranks that share a layer's matrices, by the keys that say so; 1 says nothing. Returns the key; "": none.
std::string take_tensor_degree(Document& file, Config& config) {
  const char* const keys[] = {"tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size",
                              "tensor_parallel.partition_config.tp_size"};
  std::string first;
  int& degree = config.degrees.tensor;
  const int programs = degree;
  for (const char* key : keys) {
    const auto given = static_cast<int>(file.integer_or(key, 0, kTensorRanks));
    if (given <= 1) continue;
    if (!first.empty() && given != degree)
      file.refuse(key, str("`", file.path_of(key), "` = ", given, " and `", file.path_of(first), "` = ", degree,
                           "; let them agree, or remove one of the two"));
    if (programs != 1 && programs != given)
      file.refuse(key, str("`", file.path_of(key), "` = ", given, ", and the program's tensor degree is ", programs,
                           "; remove the key, or set it to that"));
    if (first.empty()) first = key;
    degree = given;
  }
  config.tensor.autotp_size = degree > 1 ? degree : 0;
  if (config.tensor.partition_config) config.tensor.partition_config->tp_size = 0;
  return first;
}

/// A degree under the name by which it was given; empty where it cuts nothing.
std::string said(const Document& file, const std::string& key, const char* member, int degree) {
  if (degree == 1) return "";
  return file.has(key) ? str("`", file.path_of(key), "` = ", degree) : str(member, "=", degree);
}

/// The degrees of the program; the data degree is the world over the others.
void resolve_degrees(Document& file, Config& config, int world_size) {
  Degrees& degrees = config.degrees;
  std::string last_key;
  const auto take = [&](const char* name, int& degree, const char* programs) {
    if (!file.has(name)) return;
    const auto given = static_cast<int>(file.integer_or(name, 1, kPositive));
    if (degree != 1 && degree != given)
      file.refuse(name, str("`", name, "` = ", given, ", and the program's ", programs, " ", degree,
                            "; remove the key, or set it to that"));
    degree = given;
    last_key = name;
  };
  take("pipeline.stages", degrees.pipe, "stages are");
  take("sequence_parallel_size", degrees.sequence, "sequence degree is");
  const std::string tensor_key = take_tensor_degree(file, config);
  if (!tensor_key.empty()) last_key = tensor_key;
  take_autosp(file, config, world_size);
  const int64_t model = int64_t{degrees.pipe} * degrees.tensor * degrees.sequence * degrees.model;
  if (std::min({degrees.pipe, degrees.tensor, degrees.sequence, degrees.expert, degrees.replicas, degrees.model}) < 1)
    file.refuse("", str("degrees: pipe ", degrees.pipe, ", tensor ", degrees.tensor, ", sequence ", degrees.sequence,
                        ", expert ", degrees.expert, ", replicas ", degrees.replicas, ", model ", degrees.model,
                        "; each is 1 or more"));
  if (world_size % model != 0) {
    std::string product;
    for (const std::string& factor : {said(file, "pipeline.stages", "degrees.pipe", degrees.pipe),
                                      said(file, tensor_key, "degrees.tensor", degrees.tensor),
                                      said(file, "sequence_parallel_size", "degrees.sequence", degrees.sequence),
                                      said(file, "", "degrees.model", degrees.model)})
      if (!factor.empty()) product += (product.empty() ? "" : " times ") + factor;
    file.refuse(last_key, str(product, " must divide the ", world_size, " ranks; change it, or the number of ranks"));
  }
  degrees.data = static_cast<int>(world_size / model);
  if (degrees.data % degrees.expert != 0 || degrees.data % degrees.replicas != 0)
    file.refuse("", str("degrees: expert ", degrees.expert, " and replicas ", degrees.replicas,
                        " must each divide the data degree, ", degrees.data, "; choose others"));
  const char* key = "data_parallel_size";
  if (file.integer_or(key, degrees.data, kPositive) != degrees.data)
    file.not_there_yet(key, str("all ", degrees.data, " ranks are data-parallel; remove it"));
}

// --- precision -----------------------------------------------------------------------------------------------------

void resolve_modes(Document& file, PrecisionOptions& precision) {
  const bool bf16 = file.flag_or("bf16.enabled", false), fp16 = file.flag_or("fp16.enabled", false);
  precision.weight_dtype = fp16 ? at::kHalf : bf16 ? at::kBFloat16 : at::kFloat;
  precision.casts_inputs &= fp16;
  const auto exclude = [&](const char* key, const char* other) {
    file.refuse(key, str("`", file.path_of(key), "` = true and `", file.path_of(other),
                         "` = true exclude each other; set one of the two to false"));
  };
  if (fp16 && bf16) exclude("fp16.enabled", "bf16.enabled");
  if (precision.autocast.enabled && (fp16 || bf16))
    exclude("torch_autocast.enabled", fp16 ? "fp16.enabled" : "bf16.enabled");
}

/// The mode `low`, which DeepSpeed's two keys ask for together.
void resolve_update(Document& file, PrecisionOptions& precision) {
  const std::string masters = "bf16.bf16_master_weights_and_grads", states = "bf16.bf16_optimizer_states";
  const bool has_masters = file.flag_or(masters, false), has_states = file.flag_or(states, false);
  const auto refuse = [&](const std::string& key, const std::string& why) {
    file.refuse(key, str("`", file.path_of(key), "` = true ", why));
  };
  if (has_states && !has_masters)
    refuse(states, str("needs `", file.path_of(masters), "` = true, as in DeepSpeed; set both, or neither"));
  if (precision.stochastic_rounding && !has_masters)
    refuse("trireme.stochastic_rounding", str("is for updates in bf16; set `", file.path_of(masters), "` and `",
                                              file.path_of(states), "` to true, or remove it"));
  if (!has_masters) return;
  if (!has_states)
    file.not_there_yet(masters, str("states in fp32 beside weights without masters; set `", file.path_of(states),
                                    "` to true too, or remove it"));
  if (precision.weight_dtype != at::kBFloat16)
    refuse(masters, str("is for weights in bf16; set `", file.path_of("bf16.enabled"), "` to true"));
  const std::string sums = "data_types.grad_accum_dtype";
  if (file.has(sums) && precision.accumulation_dtype != at::kBFloat16)
    refuse(masters, str("sums gradients in bf16; set `", file.path_of(sums), "` to \"bf16\", or remove it"));
  precision.update_dtype = precision.accumulation_dtype = at::kBFloat16;
}

/// Values out of range are refused only where the scale is dynamic: elsewhere nobody looks at them.
void check_loss_scale(Document& file, const PrecisionOptions& precision) {
  if (!precision.needs_loss_scale() || precision.loss_scale.loss_scale != 0) return;
  (void)file.integer_or("fp16.initial_scale_power", 0, {.min = 0, .max = 126, .words = "an integer from 0 to 126"});
  for (const char* key : {"fp16.loss_scale_window", "fp16.hysteresis"}) (void)file.integer_or(key, 1, kPositive);
  const double least = precision.loss_scale.min_loss_scale;
  if (!(least > 0 && least <= kNonNegative.max)) file.fail("fp16.min_loss_scale", "a finite number > 0");
}

void check_data_types(Document& file, const PrecisionOptions& precision) {
  const std::string weights = short_name(precision.weight_dtype), sums = short_name(precision.accumulation_dtype);
  if (sums != "fp32" && sums != weights)
    file.fail("data_types.grad_accum_dtype", weights == "fp32"
                                                 ? str("\"fp32\", or ", sums, ".enabled = true for \"", sums, "\"")
                                                 : "\"fp32\" or \"" + weights + "\"");
  if (file.choice_or("data_types.param_dtype", weights, {"fp32", "bf16", "fp16"}) != weights)
    file.fail("data_types.param_dtype",
              str("\"", weights, "\", the dtype that ", weights == "fp16" ? "fp16" : "bf16", ".enabled chooses"));
  const std::string wire = short_name(precision.communication_dtype.value_or(at::kFloat));
  if (wire != "fp32" && sums != "fp32" && wire != sums)
    file.fail("communication_data_type",
              "\"fp32\" or \"" + sums + "\", in which data_types.grad_accum_dtype has the sums");
}

void resolve_prescale(Document& file, Config& config) {
  if (!file.flag_or("prescale_gradients", false)) return;
  if (config.pager.predivide_factor != 1)
    file.refuse("prescale_gradients",
                "`prescale_gradients` = true divides gradients by the number of ranks before they travel, and "
                "`gradient_predivide_factor` by another number; keep one of the two");
  config.pager.predivide_factor = config.degrees.data;
}

// --- memory --------------------------------------------------------------------------------------------------------

/// A budget of whole parameters at ZeRO stage 3. DeepSpeed counts elements, Trireme bytes: one of the two may be given.
int64_t budget(Document& file, const std::string& elements_key, int64_t default_elements, const std::string& bytes_key,
               at::ScalarType weights) {
  const int64_t elements = file.integer_or(elements_key, default_elements, kCount);
  const auto itemsize = static_cast<int64_t>(c10::elementSize(weights));
  if (!file.has(bytes_key)) return elements > kUnlimited / itemsize ? kUnlimited : elements * itemsize;
  if (file.has(elements_key))
    file.refuse(bytes_key, str("`", file.path_of(elements_key), "` and `", file.path_of(bytes_key),
                               "` are the same budget in elements and in bytes; keep one of the two"));
  return file.integer_or(bytes_key, 0, kCount);
}

void check_unit_patterns(Document& file, const Config& config) {
  const std::string key = "trireme.unit_patterns";
  for (const std::string& pattern : config.pager.units.patterns) {
    try {
      const NamePattern compiled(pattern, str("`", file.path_of(key), "`"));
    } catch (const ConfigError& error) {
      file.refuse(key, error.what());
    }
  }
}

/// An old switch, each of which a section has replaced.
bool old_switch(Document& file, const std::string& old, const std::string& section) {
  if (!file.has(old)) return false;
  if (file.has(section))
    file.refuse(old, str("`", file.path_of(old), "` and `", file.path_of(section), "` exclude each other; keep `",
                         file.path_of(section), "`"));
  warn_deprecated(file, old, section);
  return file.flag_or(old, false);
}

void require_folder(Document& file, const std::string& folder, const std::string& section) {
  const std::string key = section + ".nvme_path";
  if (folder.empty())
    file.refuse(key,
                str("`", file.path_of(key), "` is missing; set it to a folder of the disk, or the device to \"cpu\""));
  if (folder.starts_with('~'))
    file.refuse(key, str("`", file.path_of(key), "` = \"", folder,
                         "\" is no path: only a shell knows \"~\"; write it in full"));
}

void resolve_weights_on_disk(Document& file, PagerPolicy& pager, bool is_on, const std::string& section) {
  if (!is_on) pager.disk = PagerPolicy().disk;
  if (!is_on) return;
  require_folder(file, pager.disk.folder, section);
  const std::string stage = "zero_optimization.stage", device = section + ".device", gather = "trireme.gather";
  if (pager.stage != 3)
    file.refuse(device, str("`", file.path_of(device), "`: \"nvme\" keeps the shards of ZeRO stage 3 on disk, and `",
                            file.path_of(stage), "` is ", pager.stage, "; set it to 3"));
  if (pager.gather == GatherPolicy::kShared)
    file.refuse(device, str("`", file.path_of(device), "`: \"nvme\" and `", gather,
                            "`: \"shared\" exclude each other, since what ranks map is memory; set it to \"copy\""));
}

void resolve_offload(Document& file, Config& config) {
  PagerPolicy& pager = config.pager;
  const std::string zero = "zero_optimization.", optimizer = zero + "offload_optimizer", param = zero + "offload_param";
  const bool old_optimizer = old_switch(file, zero + "cpu_offload", optimizer);
  const bool old_param = old_switch(file, zero + "cpu_offload_param", param);
  (void)old_switch(file, zero + "cpu_offload_use_pin_memory", optimizer);
  const auto device_of = [&](const std::string& section) {
    return file.choice_or(section + ".device", "none", {"none", "cpu", "nvme"});
  };
  const bool on_disk = device_of(optimizer) == "nvme";
  if (on_disk) require_folder(file, config.disk.folder, optimizer);
  if (!on_disk) config.disk = {};
  resolve_weights_on_disk(file, pager, device_of(param) == "nvme", param);
  pager.offload_parameters = device_of(param) == "cpu" || old_param;
  const bool offloads = device_of(optimizer) == "cpu" || old_optimizer || (on_disk && pager.stage > 0);
  const auto warn = [&](const std::string& section, const char* fix) {
    file.warnings.push_back(str(file.origin(), ": `", file.path_of(section), "` has no effect at `",
                                file.path_of(zero + "stage"), "` ", pager.stage, "; set the stage to ", fix));
  };
  if (pager.offload_parameters && pager.stage < 3) {
    warn(param, "3");
    pager.offload_parameters = false;
  }
  // The host updates whatever it keeps.
  pager.offload_ratio = offloads                   ? file.number_or(optimizer + ".ratio", 1, kNonNegative)
                        : pager.offload_parameters ? 1
                                                   : 0;
  if (pager.offload_ratio > 0 && pager.stage == 0) {
    warn(optimizer, "1, 2 or 3");
    pager.offload_ratio = 0;
  }
  pager.offload_parameters &= pager.offload_ratio > 0;
}

void check_allgather_bucket(Document& file) {
  const char* key = "zero_optimization.allgather_bucket_size";
  if (file.integer_or(key, 0, kCount) % 2 != 0) file.fail(key, "an even integer");
}

// --- the rest ------------------------------------------------------------------------------------------------------

void check_recompute(Document& file, const Config& config) {
  for (const char* key : {"trireme.recompute.keep", "trireme.recompute.extra_compute"})
    if (config.recompute.mode != RecomputeMode::kSelective && file.has(key))
      file.refuse(key, str("`", key, "` is for \"mode\": \"selective\"; remove it"));
}

void check_whole_gradients(Document& file, const Config& config) {
  if (config.pipeline.whole_gradients == true && config.pager.deterministic)
    file.refuse(
        "trireme.pipeline.whole_gradients",
        "`trireme.pipeline.whole_gradients` sums the gradients of a rank first, and `deterministic` adds those of "
        "each micro-batch in order; keep one of the two");
}

void resolve_checkpoint(Document& file, CheckpointOptions& checkpoint) {
  if (!file.has("checkpoint.async_save")) checkpoint.async_save = file.flag_or("checkpoint.writer.decoupled", false);
  if (file.flag_or("checkpoint.load_universal", false))
    file.hints.push_back(
        "`checkpoint.load_universal`: every checkpoint loads at any number of ranks and any stage as it is; `trireme "
        "convert` takes DeepSpeed's");
}

void check_activation_checkpointing(Document& file) {
  const std::string section = "activation_checkpointing.", contiguous = section + "contiguous_memory_optimization";
  const bool has_number = file.integer_or(section + "number_checkpoints", 0, kPositive) > 0;
  if (!file.flag_or(contiguous, false)) return;
  if (!file.flag_or(section + "partition_activations", false))
    file.fail(contiguous, "false, or `partition_activations` = true beside it");
  if (!has_number)
    file.refuse(contiguous,
                str("`", contiguous, "` = true needs `", section, "number_checkpoints`, the number of layers"));
}

}  // namespace

void bring_up_to_date(Document& file) {
  rename_aliases(file);
  take_stage_as_flag(file);
  take_recompute_as_text(file);
}

void resolve(Document& file, Config& config, int world_size) {
  PrecisionOptions& precision = config.precision;
  // Each step has the keys that it reads: where one of them is mistaken, nothing can be said of the others.
  const auto step = [&](const std::vector<std::string>& keys, const auto& run) {
    if (!file.is_mistaken(keys)) file.attempt(run);
  };
  const std::vector<std::string> modes = {"bf16.enabled", "fp16.enabled", "torch_autocast"};
  const auto with = [](std::vector<std::string> keys, std::initializer_list<const char*> more) {
    keys.insert(keys.end(), more.begin(), more.end());
    return keys;
  };
  step({"data_parallel_size", "sequence_parallel_size", "compile", "pipeline.stages", "tensor_parallel.autotp_size",
        "tensor_parallel.tp.tp_size", "tensor_parallel.partition_config"},
       [&] { resolve_degrees(file, config, world_size); });
  step(modes, [&] { resolve_modes(file, precision); });
  step({"bf16", "fp16.enabled", "data_types.grad_accum_dtype", "trireme.stochastic_rounding"},
       [&] { resolve_update(file, precision); });
  step(with(modes, {"fp16"}), [&] { check_loss_scale(file, precision); });
  step(with(modes, {"data_types", "communication_data_type"}), [&] { check_data_types(file, precision); });
  config.pager.accumulation_dtype = precision.accumulation_dtype;
  const std::string live = "zero_optimization.stage3_max_live_parameters";
  const std::string ahead = "zero_optimization.stage3_prefetch_bucket_size";
  step({live, "trireme.live_bytes"}, [&] {
    config.pager.live_bytes = budget(file, live, 1'000'000'000, "trireme.live_bytes", precision.weight_dtype);
  });
  step({ahead, "trireme.prefetch_bytes"}, [&] {
    config.pager.prefetch_bytes = budget(file, ahead, 50'000'000, "trireme.prefetch_bytes", precision.weight_dtype);
  });
  step({"trireme.unit_patterns"}, [&] { check_unit_patterns(file, config); });
  step({"zero_optimization.stage", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"},
       [&] { resolve_offload(file, config); });
  step({"zero_optimization", "data_parallel_size", "sequence_parallel_size", "compile", "pipeline",
        "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "tensor_parallel.partition_config"},
       [&] { resolve_replicas(file, config); });
  step({"tensor_parallel.tp_overlap_comm", "tensor_parallel.sequence_parallel"}, [&] { check_sums(file); });
  step({"zero_optimization.allgather_bucket_size"}, [&] { check_allgather_bucket(file); });
  step({"trireme.recompute"}, [&] { check_recompute(file, config); });
  step({"deterministic", "trireme.pipeline"}, [&] { check_whole_gradients(file, config); });
  step({"gradient_predivide_factor", "prescale_gradients"}, [&] { resolve_prescale(file, config); });
  step({"comms_logger"}, [&] { check_prof_ops(file, config.observe.comms_logger); });
  step({"checkpoint"}, [&] { resolve_checkpoint(file, config.checkpoint); });
  step({"activation_checkpointing"}, [&] { check_activation_checkpointing(file); });
  step({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "data_parallel_size"},
       [&] { config.batch = read_batch_sizes(file, config.degrees.data); });
}

}  // namespace trireme
