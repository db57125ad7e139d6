// Values that are no tensors: counters, rates, the loss scaler, the configuration, the user's own.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/layouts/deepspeed/parts.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/formats/pickle/json.h"

namespace trireme::deepspeed {

using pickle::Kind;
using pickle::Value;

namespace {

/// Keys that DeepSpeed itself puts beside the client_state.
constexpr std::array<std::string_view, 22> kOwnKeys{"module",
                                                    "buffer_names",
                                                    "optimizer",
                                                    "param_shapes",
                                                    "frozen_param_shapes",
                                                    "shared_params",
                                                    "frozen_param_fragments",
                                                    "lr_scheduler",
                                                    "data_sampler",
                                                    "random_ltd",
                                                    "skipped_steps",
                                                    "global_steps",
                                                    "global_samples",
                                                    "dp_world_size",
                                                    "mp_world_size",
                                                    "ds_config",
                                                    "ds_version",
                                                    "num_experts",
                                                    "sparse_tensor_module_names",
                                                    "universal_checkpoint_info",
                                                    "checkpoint_parallel_dimensions",
                                                    "csr_tensor_module_names"};

Json client_state_of(const pickle::TorchArchive& archive) {
  Json client = Json::object();
  const Value& root = archive.root();
  for (size_t i = 0; i < root.items.size(); i += 2) {
    const std::string& key = root.items[i]->text;
    if (std::find(kOwnKeys.begin(), kOwnKeys.end(), key) != kOwnKeys.end()) continue;
    const auto json = root.items[i]->is(Kind::kString) ? pickle::to_json(*root.items[i + 1]) : std::nullopt;
    constexpr size_t kMostKeys = 10'000;
    if (client.size() >= kMostKeys)
      throw CheckpointError(str(archive.path().string(), ": more than ", kMostKeys,
                                " entries beside the model; keep them in one dict of the client_state"));
    if (json) client[key] = *json;
    if (!json) {
      log(LogLevel::kWarning, str(archive.path().string(), ": client_state[\"", key, "\"] is ",
                                  kind_name(root.items[i + 1]->kind), ", or holds what is no JSON; it is left out"));
    }
  }
  return client;
}

int64_t count_of(const Value& root, const char* key) {
  const Value* found = root.find(key);
  return found && found->is(Kind::kInt) ? found->integer : 0;
}

Json json_or_null(const Value* value) { return value ? pickle::to_json(*value).value_or(nullptr) : Json(nullptr); }

int64_t positive(const Json& config, const char* key) {
  const auto found = config.find(key);
  return found != config.end() && found->is_number_integer() && *found > 0 ? found->get<int64_t>() : 0;
}

/// Micro-batches of a step: DeepSpeed counts them, but does not save the count.
int64_t accumulation_of(const Json& config, int64_t ranks) {
  if (!config.is_object()) return 1;
  if (const int64_t steps = positive(config, "gradient_accumulation_steps")) return steps;
  const int64_t batch = positive(config, "train_batch_size");
  const int64_t micro_batch = positive(config, "train_micro_batch_size_per_gpu");
  return batch && micro_batch && batch >= micro_batch * ranks ? batch / (micro_batch * ranks) : 1;
}

void add_optimizer_values(TrainingValues& values, const ModelPart& model, const RankPart& part,
                          const std::vector<std::vector<Parameter>>& trained) {
  for (const std::string& name : model.names) values.set_steps(name, 0);  // what is in no group is frozen
  for (size_t group = 0; group < part.members.size(); ++group) {
    const Json& options = part.group_options[group];
    if (const auto lr = options.find("lr"); lr != options.end() && lr->is_number())
      values.group_lrs.push_back(lr->get<double>());
    GroupValues& described = values.groups.emplace_back();
    described.options = options.dump();
    for (const int64_t member : part.members[group])
      for (const Parameter& parameter : trained[member]) {
        described.names.push_back(parameter.name);
        values.set_steps(parameter.name, part.groups[member].step);
      }
  }
  values.lr = values.group_lrs.empty() ? 0 : values.group_lrs[0];
}

}  // namespace

TrainingValues values_of(const pickle::TorchArchive& archive, const ModelPart& model, const RankPart& part,
                         const std::vector<std::vector<Parameter>>& trained) {
  const Value& root = archive.root();
  const Json config = json_or_null(root.find("ds_config"));
  const int64_t ranks = std::max<int64_t>(count_of(root, "dp_world_size"), 1);
  TrainingValues values;
  values.global_steps = count_of(root, "global_steps");
  values.micro_steps = *values.global_steps * accumulation_of(config, ranks);
  values.skipped_steps = count_of(root, "skipped_steps");
  values.global_samples = count_of(root, "global_samples");
  const bool is_half = std::any_of(model.module.begin(), model.module.end(),
                                   [](const auto& item) { return item.second->place->dtype == at::kHalf; });
  if (is_half) values.loss_scaler = part.loss_scaler;
  values.aliases = model.aliases;
  const Value* frozen = root.find("frozen_param_shapes");
  values.exclude_frozen_parameters = part.stage >= 2 && (!frozen || frozen->is(Kind::kNone));
  add_optimizer_values(values, model, part, trained);
  values.config = config.dump();
  values.client_state = client_state_of(archive).dump();
  values.others = Json{{"deepspeed",
                        {{"version", json_or_null(root.find("ds_version"))},
                         {"stage", part.stage},
                         {"ranks", ranks},
                         {"lr_scheduler", json_or_null(root.find("lr_scheduler"))}}}}
                      .dump();
  return values;
}

}  // namespace trireme::deepspeed
