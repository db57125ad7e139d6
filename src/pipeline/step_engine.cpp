#include "trireme/pipeline/step_engine.h"

#include <torch/nn/module.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/config/config.h"
#include "trireme/intercept.h"
#include "trireme/pager/init/init.h"
#include "trireme/parallel/exclusions.h"
#include "trireme/tensor/tensor_parallel.h"

namespace trireme {
namespace {

void set_stages(InitializeOptions& options, int stages) {
  Config* const config = std::get_if<Config>(&options.config);
  (config != nullptr ? config->degrees : options.degrees).pipe = stages;
}

/// Holds tensors under their names, module by module.
struct Part final : torch::nn::Module {
  using torch::nn::Module::Module;
};

/// The tensors of `module` that `is_there` names, in modules of the same names.
template <class IsThere>
std::shared_ptr<torch::nn::Module> part_of(const torch::nn::Module& module, const std::string& prefix,
                                           const IsThere& is_there) {
  auto part = std::make_shared<Part>(module.name());
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    if (is_there(prefix + item.key())) part->register_parameter(item.key(), item.value(), item.value().requires_grad());
  for (const auto& item : module.named_buffers(/*recurse=*/false))
    if (is_there(prefix + item.key())) part->register_buffer(item.key(), item.value());
  for (const auto& child : module.named_children()) {
    auto inner = part_of(*child.value(), prefix + child.key() + ".", is_there);
    if (!inner->parameters().empty() || !inner->buffers().empty()) part->register_module(child.key(), std::move(inner));
  }
  return part;
}

/// Calls `visit` with each parameter and buffer of `model`, and its name; a tied one under every name.
template <class Visit>
void for_each_named(const torch::nn::Module& model, const Visit& visit) {
  for (const auto& item : model.named_parameters())
    if (item.value().defined()) visit(item.key(), item.value());
  for (const auto& item : model.named_buffers())
    if (item.value().defined()) visit(item.key(), item.value());
}

/// The stage of each tensor by its names: that of its first name, as a tied tensor is on one stage.
std::map<std::string, int> stages_by_name(const torch::nn::Module& model, const StageOf& stage_of, int stages) {
  std::map<std::string, int> by_name;
  std::map<const c10::StorageImpl*, int> by_storage;
  for_each_named(model, [&](const std::string& name, const at::Tensor& tensor) {
    const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    if (!by_storage.contains(storage)) {
      const int stage = stages == 1 ? 0 : stage_of(name);
      if (stage < 0 || stage >= stages)
        throw ConfigError(str("'", name, "' on stage ", stage, ": there are stages 0 to ", stages - 1));
      by_storage.emplace(storage, stage);
    }
    by_name.emplace(name, by_storage.at(storage));
  });
  return by_name;
}

/// Whether stages follow each other as the model's tensors do.
bool is_in_order(const torch::nn::Module& model, const std::map<std::string, int>& stages) {
  int last = 0;
  bool is_in_order = true;
  for (const auto& item : model.named_parameters()) {
    const int stage = stages.at(item.key());
    is_in_order = is_in_order && stage >= last;
    last = stage;
  }
  return is_in_order;
}

void check_whole(const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters())
    if (zero::is_sharded(item.value())) {
      const Exclusion& row = exclusion_of(Feature::kOwnership, Feature::kInit);
      throw ConfigError(filled(row.text, {item.key()}), row.code);
    }
}

/// Gives the tensors of other stages the dtypes that they get there.
void cast_remote(const torch::nn::Module& model, const std::map<std::string, int>& stages, int own,
                 const PrecisionOptions& precision) {
  const at::NoGradGuard no_grad;
  const auto cast = [&](const std::string& name, at::Tensor tensor, std::optional<at::ScalarType> dtype) {
    if (!dtype || !tensor.defined() || !tensor.is_floating_point() || stages.at(name) == own) return;
    if (tensor.scalar_type() != *dtype) tensor.set_data(tensor.to(*dtype));
  };
  const bool casts_weights = precision.weight_dtype != at::kFloat;
  for (const auto& item : model.named_parameters())
    cast(item.key(), item.value(), casts_weights ? std::optional(precision.weight_dtype) : std::nullopt);
  for (const auto& item : model.named_buffers()) cast(item.key(), item.value(), precision.buffer_dtype);
}

void own_all(Ownership& ownership, const torch::nn::Module& model, const std::map<std::string, int>& stages,
             bool are_here) {
  for_each_named(model, [&](const std::string& name, const at::Tensor& tensor) {
    const int stage = stages.at(name);
    if ((stage == ownership.stage()) == are_here) ownership.own(tensor, stage, name);
  });
}

}  // namespace

detail::OwnedStage::OwnedStage(Group& world, const Topology& topology, torch::nn::Module& model,
                               const StageOf& stage_of, const InitializeOptions& given, const OwnedStage* beside)
    : grid(beside != nullptr ? beside->grid : std::make_shared<Grid>(world, topology)), options(given) {
  Group& stages = grid->along({"pipe"});
  set_stages(options, stages.size());
  options.has_ownership = true;
  // One answer, on which all ranks build.
  const std::map<std::string, int> by_name = stages_by_name(model, stage_of, stages.size());
  const auto difference = first_different_line(world, [&] {
    std::string text;
    for (const auto& [name, stage] : by_name) text += str("'", name, "' on stage ", stage, "\n");
    return text;
  });
  if (difference) throw ConfigError(str("stages of the model: the ranks differ: ", difference->text()));
  if (stages.size() > 1) check_whole(model);
  if (stages.size() > 1 && !is_in_order(model, by_name)) {
    if (!options.partition_model) options.partition_model.emplace();
    options.partition_model->is_ordered = false;  // rules look at neighbours
  }
  const Config config = resolved_config(options, world.size());
  if (stages.size() > 1 && config.recompute.mode == RecomputeMode::kFull)
    throw ConfigError(filled(exclusion_of(Feature::kOwnership, Feature::kRecomputeLayers).text, {str(stages.size())}));
  const int own = stages.rank();
  part = part_of(model, "", [&](const std::string& name) {
    const auto found = by_name.find(name);
    return found != by_name.end() && found->second == own;
  });
  const auto parameters = model.parameters();
  const c10::Device device = parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().device();
  ownership = beside != nullptr ? beside->ownership : std::make_shared<Ownership>(stages, device);
  cast_remote(model, by_name, own, config.precision);
  own_all(*ownership, model, by_name, /*are_here=*/false);
  homes = by_name;
}

StepEngine::StepEngine(Group& world, const Topology& topology, torch::nn::Module& model, const StageOf& stage_of,
                       const StepRunnerOptions& step, const InitializeOptions& options)
    : StepEngine(detail::OwnedStage(world, topology, model, stage_of, options, nullptr), model, &step, nullptr) {}

StepEngine::StepEngine(StepEngine& beside, torch::nn::Module& model, const StageOf& stage_of,
                       const InitializeOptions& options)
    : StepEngine(detail::OwnedStage(beside.grid->world(), beside.topology(), model, stage_of, options, &beside), model,
                 nullptr, beside.runner_) {}

StepEngine::StepEngine(detail::OwnedStage stage, torch::nn::Module& model, const StepRunnerOptions* step,
                       std::shared_ptr<StepRunner> runner)
    : OwnedStage(std::move(stage)),
      EngineBase(*grid, *part, OwnedStage::options),
      parameters_([&] {
        std::vector<Watched> watched;
        for (const auto& item : model.named_parameters())
          if (item.value().defined()) watched.push_back({item.key(), item.value(), item.value().requires_grad()});
        return watched;
      }()),
      runner_(runner ? std::move(runner) : std::make_shared<StepRunner>(*grid, *ownership, *step)) {
  if (TensorParallel* const slices = training().passes().find<TensorParallel>(); slices != nullptr && stages() > 1) {
    ownership->set_cuts(*slices);
    own_all(*ownership, model, homes, /*are_here=*/false);
  }
  // A Training gives its tensors memory of its own.
  own_all(*ownership, model, homes, /*are_here=*/true);
  runner_->join(training(), [this] { check_parameters(); });
}

StepEngine::~StepEngine() { leave_steps(); }

void StepEngine::destroy() {
  EngineBase::destroy();
  leave_steps();
}

void StepEngine::check_parameters() {
  training().condition().require_intact("step");
  if (stages() == 1) return;
  const CallerScope caller("step");
  const WithoutInterception own_operators;
  const auto difference = first_different_line(grid->along({"pipe"}), [this] {
    std::string trained;
    for (const auto& [name, parameter, was_trained] : parameters_) {
      const std::optional<Home> home = home_of(parameter);
      if (!home || home->stage != homes.at(name))
        throw StateError(str("step: parameter '", name,
                             "' was given other memory (set_data, or .data = …) since stage ", homes.at(name),
                             " owns it; write into it there, without a graph: parameter.copy_(values)"));
      if (parameter.requires_grad() && !was_trained)
        throw StateError(str("step: parameter '", name,
                             "' is trained and was frozen when the model was given to its stages, so that there is no "
                             "gradient of it; leave it trained until then, and freeze it afterwards"));
      trained += str("'", name, "' is ", parameter.requires_grad() ? "trained\n" : "frozen\n");
    }
    return trained;
  });
  if (difference)
    throw StateError(str("step: ", difference->of_rank_0, " on stage 0, and ", difference->of_rank, " on stage ",
                         difference->rank, "; set requires_grad on every rank"));
}

}  // namespace trireme
