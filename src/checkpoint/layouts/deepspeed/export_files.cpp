// The dictionaries of DeepSpeed's model and optimizer files.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/layouts/deepspeed/export.h"
#include "trireme/base/error.h"
#include "trireme/base/json_limits.h"
#include "trireme/checkpoint/reshard.h"
#include "trireme/formats/pickle/json.h"

namespace trireme::deepspeed {
namespace {

using pickle::Document;
using pickle::Value;

Value* config_of(Document& document, const ExportPlan& plan) { return pickle::from_json(document, plan.config); }

Value* strings(Document& document, const std::vector<std::string>& texts) {
  std::vector<Value*> items;
  for (const std::string& text : texts) items.push_back(document.string(text));
  return document.list(std::move(items));
}

/// Names and shapes of each flat tensor's parameters, in its order.
Value* param_shapes(Document& document, const ExportPlan& plan) {
  std::vector<Value*> groups;
  for (const FlatParameters& flat : plan.flat) {
    Document::Pairs shapes;
    for (const ExportedParameter* parameter : flat.parameters)
      shapes.emplace_back(parameter->name, document.size(parameter->shape));
    groups.push_back(document.dict(shapes, /*ordered=*/true));
  }
  return document.list(std::move(groups));
}

/// The module's state_dict. With ZeRO stage 3, parameters are empty in it.
Value* module_of(ArchiveFile& file, const ExportPlan& plan, const Manifest& manifest) {
  Document& document = file.document();
  Document::Pairs pairs;
  std::map<std::string, Value*> by_name;
  const size_t parameters = plan.module.size() - plan.buffers.size();
  for (size_t i = 0; i < plan.module.size(); ++i) {
    const auto& [name, index] = plan.module[i];
    const SavedTensor& tensor = manifest.tensors[index];
    const bool is_empty = plan.stage == 3 && i < parameters;
    const int64_t numel = is_empty ? 0 : checked_numel(tensor.shape, name);
    pairs.emplace_back(
        name, file.tensor({{index, 0, numel, 0}}, tensor.dtype, is_empty ? std::vector<int64_t>{0} : tensor.shape));
    by_name.insert(pairs.back());
  }
  for (const auto& [alias, name] : plan.values.aliases)
    if (const auto found = by_name.find(name); found != by_name.end()) pairs.emplace_back(alias, found->second);
  return document.dict(pairs, /*ordered=*/true);
}

Value* loss_scaler_of(Document& document, const ExportPlan& plan) {
  const std::string module = "deepspeed.runtime.fp16.loss_scaler.";
  if (!plan.values.loss_scaler)
    return document.instance(module + "LossScaler",
                             {{"cur_scale", document.real(1)}, {"dynamic", document.boolean(false)}});
  const LossScalerValues& state = *plan.values.loss_scaler;
  const Json fp16 = plan.config.value("fp16", Json::object());
  return document.instance(module + "DynamicLossScaler",
                           {{"cur_scale", document.real(state.scale)},
                            {"dynamic", document.boolean(true)},
                            {"cur_iter", document.integer(state.steps)},
                            {"last_overflow_iter", document.integer(state.last_overflow)},
                            {"scale_factor", document.real(2)},
                            {"scale_window", document.integer(fp16.value("loss_scale_window", int64_t{1000}))},
                            {"min_scale", document.real(fp16.value("min_loss_scale", 1.0))},
                            {"delayed_shift", document.integer(fp16.value("hysteresis", int64_t{2}))},
                            {"cur_hysteresis", document.integer(state.hysteresis)},
                            {"consecutive_hysteresis", document.boolean(fp16.value("consecutive_hysteresis", false))},
                            {"raise_error_at_min_scale", document.boolean(true)},
                            {"dtype", document.dtype(at::kHalf)}});
}

/// A torch optimizer's state_dict over this rank's flat tensors.
Value* base_optimizer(ArchiveFile& file, const ExportPlan& plan, int rank) {
  Document& document = file.document();
  Value& states = document.add(pickle::Kind::kDict);
  std::vector<std::vector<Value*>> members(plan.groups.size());
  for (size_t i = 0; i < plan.flat.size(); ++i) {
    const FlatParameters& flat = plan.flat[i];
    Document::Pairs pairs{{"step", file.scalar(static_cast<float>(plan.groups[flat.group].step))}};
    for (const std::string& state : plan.states)
      pairs.emplace_back(state, file.flat(part_of_rank(plan, flat, rank, state)));
    states.items.push_back(document.integer(static_cast<int64_t>(i)));
    states.items.push_back(document.dict(pairs));
    members[flat.group].push_back(states.items[states.items.size() - 2]);
  }
  std::vector<Value*> groups;
  for (size_t group = 0; group < plan.groups.size(); ++group) {
    Document::Pairs pairs;
    for (const auto& [key, value] : plan.groups[group].options.items()) {
      Value* option = pickle::from_json(document, value);
      if (option->is(pickle::Kind::kList)) option->kind = pickle::Kind::kTuple;  // betas
      pairs.emplace_back(key, option);
    }
    pairs.emplace_back("params", document.list(members[group]));
    groups.push_back(document.dict(pairs));
  }
  return document.dict({{"state", &states}, {"param_groups", document.list(std::move(groups))}});
}

/// Where this rank's parameters lie in its flat tensors, for DeepSpeed's universal checkpoints.
Value* slice_mappings(Document& document, const ExportPlan& plan, int rank) {
  std::vector<Value*> groups;
  for (const FlatParameters& flat : plan.flat) {
    Document::Pairs pairs;
    int64_t begin = 0;
    for (const PaddedRange& range : part_of_rank(plan, flat, rank, "")) {
      const auto parameter = std::find_if(flat.parameters.begin(), flat.parameters.end(),
                                          [&](const ExportedParameter* p) { return p->weights == range.tensor; });
      pairs.emplace_back((*parameter)->name, document.instance("deepspeed.utils.tensor_fragment.fragment_address",
                                                               {{"numel", document.integer(range.numel)},
                                                                {"start", document.integer(begin)}}));
      begin += range.numel;
    }
    groups.push_back(document.dict(pairs, /*ordered=*/true));
  }
  return document.list(std::move(groups));
}

/// Values that only ZeRO stages 1 and 2 save: how flat tensors were padded and cut.
void add_partition_values(Document& document, const ExportPlan& plan, int rank, Document::Pairs& pairs) {
  std::vector<Value*> paddings;
  std::vector<Value*> alignments;
  std::vector<Value*> counts;
  for (const FlatParameters& flat : plan.flat) {
    int64_t weights = 0;
    int64_t padded = 0;
    for (const PaddedRange& range : part_of_rank(plan, flat, rank, "")) weights += range.numel;
    for (const PaddedRange& range : part_of_rank(plan, flat, rank, plan.states[0])) padded += range.numel + range.zeros;
    paddings.push_back(document.integer(padded - weights));
    std::vector<Value*> none(flat.parameters.size(), document.integer(0));
    alignments.push_back(document.list(std::move(none)));
    counts.push_back(document.integer(plan.ranks));
  }
  pairs.emplace_back("group_paddings", document.list(std::move(paddings)));
  pairs.emplace_back("param_alignment_paddings", document.list(std::move(alignments)));
  pairs.emplace_back("partition_count", document.list(std::move(counts)));
  pairs.emplace_back("ds_version", document.string(kWrittenVersion));
  pairs.emplace_back("param_slice_mappings", slice_mappings(document, plan, rank));
}

/// ZeRO stage 2 keeps frozen parameters apart as well, ZeRO stage 3 a part of each.
void add_frozen_values(ArchiveFile& file, const ExportPlan& plan, const Manifest& manifest, int rank,
                       Document::Pairs& pairs) {
  Document& document = file.document();
  Document::Pairs shapes;
  Document::Pairs fragments;
  for (const auto& [name, index] : plan.frozen) {
    const SavedTensor& tensor = manifest.tensors[index];
    const int64_t numel = checked_numel(tensor.shape, name);
    const int64_t part = plan.stage == 3 ? (numel + plan.ranks - 1) / plan.ranks : numel;
    const int64_t begin = plan.stage == 3 ? std::min(rank * part, numel) : 0;
    const int64_t count = std::min(part, numel - begin);
    shapes.emplace_back(name, document.size(tensor.shape));
    fragments.emplace_back(name, file.tensor({{index, begin, count, part - count}}, tensor.dtype,
                                             plan.stage == 3 ? std::vector<int64_t>{part} : tensor.shape));
  }
  const bool left_out = plan.values.exclude_frozen_parameters.value_or(false);
  const bool has_them = plan.stage >= 2 && !left_out;
  pairs.emplace_back("frozen_param_shapes", has_them ? document.dict(shapes, /*ordered=*/true) : document.none());
  pairs.emplace_back("frozen_param_fragments", has_them ? document.dict(fragments, /*ordered=*/true) : document.none());
}

}  // namespace

void write_model_file(ArchiveFile& file, const ExportPlan& plan, const Manifest& manifest, int rank) {
  Document& document = file.document();
  const TrainingValues& values = plan.values;
  Document::Pairs pairs{{"module", module_of(file, plan, manifest)},
                        {"buffer_names", strings(document, plan.buffers)},
                        {"optimizer", document.none()},
                        {"param_shapes", param_shapes(document, plan)}};
  add_frozen_values(file, plan, manifest, rank, pairs);
  const int64_t applied = *values.global_steps - *values.skipped_steps;
  const std::vector<std::pair<const char*, Value*>> others{
      {"shared_params", pickle::from_json(document, Json(values.aliases))},
      {"lr_scheduler", document.dict({{"last_batch_iteration", document.integer(applied - 1)}})},
      {"data_sampler", document.none()},
      {"random_ltd", document.none()},
      {"skipped_steps", document.integer(*values.skipped_steps)},
      {"global_steps", document.integer(*values.global_steps)},
      {"global_samples", document.integer(*values.global_samples)},
      {"dp_world_size", document.integer(plan.ranks)},
      {"mp_world_size", document.integer(1)},
      {"checkpoint_parallel_dimensions",
       document.dict({{"pp_degree", document.integer(1)}, {"tp_degree", document.integer(1)}})},
      {"ds_config", config_of(document, plan)},
      {"ds_version", document.string(kWrittenVersion)}};
  for (const auto& [key, value] : others) pairs.emplace_back(key, value);
  const Json client = parse_own_json(values.client_state.value_or("{}"));
  for (const auto& [key, value] : client.items()) {
    if (std::any_of(pairs.begin(), pairs.end(), [&, &name = key](const auto& pair) { return pair.first == name; }))
      throw CheckpointError(
          str("client_state[\"", key, "\"]: DeepSpeed keeps a value of its own under this key; rename it"));
    pairs.emplace_back(key, pickle::from_json(document, value));
  }
  file.finish(document.dict(pairs));
}

void write_optimizer_file(ArchiveFile& file, const ExportPlan& plan, int rank) {
  Document& document = file.document();
  std::vector<Value*> weights;
  for (const FlatParameters& flat : plan.flat) weights.push_back(file.flat(part_of_rank(plan, flat, rank, "")));
  Document::Pairs pairs{
      {"loss_scaler", loss_scaler_of(document, plan)},
      {"dynamic_loss_scale", document.boolean(plan.values.loss_scaler.has_value())},
      {"overflow", document.boolean(false)},
      {"zero_stage", document.call("deepspeed.runtime.zero.config.ZeroStageEnum", {document.integer(plan.stage)})},
      {plan.stage == 3 ? "optimizer_state_dict" : "base_optimizer_state", base_optimizer(file, plan, rank)},
      {plan.stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups", document.list(std::move(weights))}};
  if (plan.stage == 3) pairs.emplace_back("partition_count", document.integer(plan.ranks));
  if (plan.stage != 3) add_partition_values(document, plan, rank, pairs);
  file.finish(document.dict({{"optimizer_state_dict", document.dict(pairs)},
                             {"ds_config", config_of(document, plan)},
                             {"ds_version", document.string(kWrittenVersion)}}));
}

}  // namespace trireme::deepspeed
