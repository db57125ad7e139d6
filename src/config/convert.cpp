#include "trireme/config/dialects.h"

#include <nlohmann/json.hpp>

#include "config/dialects/accelerate.h"

namespace trireme {
namespace {

struct Advice {
  const char* keys;  ///< the beginning of their paths
  const char* instead;
};

/// For settings that FSDP leaves to the program; the first that fits.
constexpr Advice kAdvice[] = {
    {"train_", "give it to the program's DataLoader(batch_size=…)"},
    {"gradient_accumulation_steps", "give it to Accelerator(gradient_accumulation_steps=…)"},
    {"bf16.bf16_", "load the model in bf16 in the program, and set mixed_precision to no"},
    {"gradient_clipping", "call accelerator.clip_grad_norm_(model.parameters(), …) before optimizer.step()"},
    {"optimizer", "make the optimizer in the program, of torch.optim"},
    {"scheduler", "make the scheduler in the program, of torch.optim.lr_scheduler"},
    {"fp16.", "give it to GradScalerKwargs in the program"},
    {"torch_autocast.", "use torch.autocast in the program"},
    {"communication_data_type", "give MixedPrecisionPolicy(reduce_dtype=…) to the plugin in the program"},
    {"data_types.", "give MixedPrecisionPolicy(…) to the plugin in the program"},
    {"zero_optimization.stage", "FSDP has no stage 1; SHARD_GRAD_OP, which stands there, gives the same losses"},
    {"zero_optimization.mics_shard_size", "FSDP replicates shards at stages 2 and 3; set one of them"},
    {"sequence_parallel_size",
     "FSDP cuts samples in a ring alone, by parallelism_config_cp_size; keep a DeepSpeed file"},
    {"zero_optimization.offload", "FSDP offloads all or nothing; set fsdp_offload_params, or keep a DeepSpeed file"},
    {"", "keep a DeepSpeed file for it: FSDP has no word for it"},
};

/// By path, every value that is no object.
void collect_leaves(const Json& json, const std::string& path, std::map<std::string, Json>& leaves) {
  if (!json.is_object()) {
    leaves[path] = json;
    return;
  }
  for (const auto& item : json.items())
    collect_leaves(item.value(), path.empty() ? item.key() : path + "." + item.key(), leaves);
}

std::map<std::string, Json> leaves_of(const Config& config) {
  std::map<std::string, Json> leaves;
  collect_leaves(to_json(config), "", leaves);
  return leaves;
}

/// The settings of `config` that are lost in `text`, a file of the other dialect.
std::vector<std::string> lost_in(const std::string& text, const Config& config, bool has_batch_size) {
  const auto found = leaves_of(config_from_source(parse_source(text, "converted.yaml"), config.degrees.data));
  std::vector<std::string> lost;
  for (const auto& [path, value] : leaves_of(config)) {
    const auto there = found.find(path);
    if (there != found.end() && there->second == value) continue;
    if (!has_batch_size && path.starts_with("train_")) continue;  // the program's in both files
    for (const Advice& advice : kAdvice) {
      if (!path.starts_with(advice.keys)) continue;
      lost.push_back(str("`", path, "` = ", value.dump(), ": ", advice.instead));
      break;
    }
  }
  return lost;
}

}  // namespace

Conversion convert(const ConfigSource& given, Dialect to, int world_size) {
  ConfigSource source = given;
  const auto is_open = [&](const char* key) {
    return !source.options.contains(key) || source.options[key].is_null() || source.options[key] == "auto";
  };
  const bool has_batch_size = !is_open("train_batch_size") || !is_open("train_micro_batch_size_per_gpu");
  const auto is_auto = [&](const char* key) { return source.options.contains(key) && is_open(key); };
  // The program has the batch size, as with a file of Accelerate.
  if (!has_batch_size && (is_auto("train_batch_size") || is_auto("train_micro_batch_size_per_gpu")))
    source.micro_batch = 1;
  const Config config = config_from_source(source, world_size);
  if (to == Dialect::kDeepSpeed) {
    Json options = source.options;
    if (!options.contains("train_batch_size") && !options.contains("train_micro_batch_size_per_gpu"))
      options["train_micro_batch_size_per_gpu"] = "auto";
    Conversion converted{.text = options.dump(2) + "\n", .left_out = {}};
    if (source.steps_in_the_models_dtype && config.precision.weight_dtype == at::kFloat)
      converted.left_out.push_back(
          "a model that the program loads in bf16 is stepped in bf16 by FSDP, and has fp32 masters here; for the same "
          "set `bf16.enabled`, `bf16.bf16_master_weights_and_grads` and `bf16.bf16_optimizer_states` to true");
    return converted;
  }
  Conversion converted{
      .text = write_accelerate(to_json(config), config.states_over_replicas ? 1 : config.degrees.replicas),
      .left_out = {}};
  converted.left_out = lost_in(converted.text, config, has_batch_size);
  for (const std::string& setting : converted.left_out) converted.text += "# " + setting + "\n";
  return converted;
}

std::string dialect_map() { return accelerate_table(); }

}  // namespace trireme
