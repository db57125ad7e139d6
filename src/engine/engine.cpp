#include "trireme/engine/engine.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <string_view>
#include <utility>

#include "engine/dtypes_in_use.h"
#include "engine/forward_checks.h"
#include "engine/loss_checks.h"
#include "engine/module_tensors.h"
#include "engine/recompute_layers.h"
#include "engine/stages.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/heap.h"
#include "trireme/base/log.h"
#include "trireme/base/pattern.h"
#include "trireme/checkpoint/async_save.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/comm/device_group.h"
#include "trireme/engine/model_agreement.h"
#include "trireme/intercept.h"
#include "trireme/optim/client_trial.h"
#include "trireme/pager/leaf_modules.h"
#include "trireme/parallel/exclusions.h"

namespace trireme {

/// An Engine's configuration, and the groups that it asks for.
struct EngineSetup {
  Config config;
  EngineGroups groups;
};

namespace {

Config resolve(const InitializeOptions& options, int world_size) {
  if (std::holds_alternative<std::monostate>(options.config)) return default_config(world_size, options.degrees);
  if (const auto* path = std::get_if<std::filesystem::path>(&options.config))
    return read_config(*path, world_size, options.degrees);
  // What a file would be refused for is refused here too.
  Config config = std::get<Config>(options.config);
  config.degrees = parse_config(to_text(config), world_size, config.degrees).degrees;
  return config;
}

void write_resolved(const Config& config, const std::filesystem::path& directory) {
  FileSystem& files = posix_file_system();
  files.create_directories(directory);
  write_file_atomically(files, directory / "resolved_config.json", to_text(config));
}

void check_has_trainable(const std::vector<ParameterSpec>& parameters) {
  for (const ParameterSpec& parameter : parameters)
    if (parameter.trainable) return;
  throw ConfigError(
      "optimizer: the module has no parameter that requires a gradient; unfreeze one, or leave the optimizer out");
}

/// As the parameters will be when they are cast.
std::vector<ParameterSpec> specs_of(const ModuleTensors& tensors, const PrecisionOptions& precision) {
  std::vector<ParameterSpec> specs;
  for (const NamedParameter& parameter : tensors.parameters)
    specs.push_back({parameter.name, parameter.tensor.sizes().vec(), dtype_of_weight(parameter.tensor, precision),
                     parameter.tensor.requires_grad()});
  return specs;
}

/// group_parameters() of the whole model, of which the next `count` parameters from `first` are this rank's.
GroupedParameters group_own(const OptimizerOptions& optimizer, const std::vector<ParameterGroup>& groups,
                            const WholeModel& model, size_t count) {
  GroupedParameters grouped = group_parameters(optimizer, groups, model.parameters);
  const auto first = grouped.group_of.begin() + static_cast<ptrdiff_t>(model.first);
  grouped.group_of = std::vector<int>(first, first + static_cast<ptrdiff_t>(count));
  return grouped;
}

void check_client(const Config& config, const InitializeOptions& options) {
  if (!options.client_optimizer) return;
  if (config.optimizer)
    throw ConfigError(str("client_optimizer: the configuration has the optimizer ",
                          optimizer_name(config.optimizer->kind), " too; remove one of the two"));
  if (!options.parameter_groups.empty())
    throw ConfigError(filled(exclusion_of(Feature::kParameterGroups, Feature::kClientOptimizer).text,
                             {str(options.parameter_groups.size())}));
}

/// Collective. Every rank throws where one's factory makes no optimizer that can be stepped: that one its own error.
void try_client(Group& group, const ClientOptimizerFactory& factory, const std::vector<ParameterSpec>& parameters,
                c10::Device device) {
  std::exception_ptr own;
  try {
    try_client_optimizer(factory, parameters, device);
  } catch (...) {
    own = std::current_exception();
  }
  try {
    all_or_throw(group, [&] {
      if (own) std::rethrow_exception(own);
    });
  } catch (...) {
    if (own) std::rethrow_exception(own);
    throw;
  }
}

std::function<PresentBuffers()> list_of_buffers(const torch::nn::Module& module, const InitializeOptions& options) {
  if (options.present_buffers) return options.present_buffers;
  return [&module] { return buffers_of(module); };
}

TrainStepOptions step_options(const Config& config) {
  return {.micro_batch_size = config.batch.train_micro_batch_size_per_gpu,
          .accumulation_steps = config.batch.gradient_accumulation_steps,
          .managed_accumulation = config.managed_gradient_accumulation,
          .ignore_unused_parameters = config.ignore_unused_parameters,
          .max_norm = config.gradient_clipping,
          .steps_per_print = config.steps_per_print,
          .precision = config.precision};
}

/// For a world or a grid.
template <class Ranks>
EngineSetup setup_for(Ranks& ranks, int world_size, const InitializeOptions& options) {
  Config config = resolve(options, world_size);
  EngineGroups groups = groups_of(ranks, parallel_options(config));
  return {.config = std::move(config), .groups = std::move(groups)};
}

c10::Device device_of(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) return parameter.device();
  return c10::Device(c10::kCPU);
}

}  // namespace

Engine::Engine(Group& group, torch::nn::Module& module, const InitializeOptions& options)
    : Engine(setup_for(group, group.size(), options), module, options) {}

Engine::Engine(const Grid& grid, torch::nn::Module& module, const InitializeOptions& options)
    : Engine(setup_for(grid, grid.world().size(), options), module, options) {}

Engine::Engine(EngineSetup setup, torch::nn::Module& module, const InitializeOptions& options)
    : config_(std::move(setup.config)),
      grid_(std::move(setup.groups.grid)),
      group_(group_for(setup.groups.shards, device_of(module), device_group_)),
      model_(&setup.groups.model == &setup.groups.shards
                 ? group_
                 : group_for(setup.groups.model, device_of(module), device_model_group_)),
      plan_(std::move(setup.groups.plan)),
      stages_(setup.groups.stages),
      topology_(setup.groups.topology) {
  const CallerScope caller("initialize");
  const WithoutInterception own_operators;
  // First all that can be refused, then what changes the module.
  check_precision(config_.precision);
  if (config_.optimizer) check_optimizer(*config_.optimizer);
  check_client(config_, options);
  ModuleTensors tensors = list_tensors(module, config_.precision, options.unmanaged);
  const WholeModel model = whole_model(stages_, specs_of(tensors, config_.precision));
  first_parameter_ = model.first;
  GroupedParameters grouped;
  if (config_.optimizer || options.client_optimizer) check_has_trainable(model.parameters);
  if (config_.optimizer)
    grouped = group_own(*config_.optimizer, options.parameter_groups, model, tensors.parameters.size());
  const ScheduleOptions schedule = config_.scheduler.value_or(ScheduleOptions{});
  std::optional<Hyperparameters> hyperparameters;
  if (!options.client_optimizer) hyperparameters.emplace(grouped.options, schedule);
  PagerPolicy policy = config_.pager;
  policy.gradient_op = plan_.reduce_op;
  policy.units.leaves = find_leaf_modules(module, config_.leaf_modules);
  policy.accumulation_dtype = config_.precision.accumulation_dtype;
  check_manageable(group_, tensors.parameters, policy);
  check_same_model(group_, tensors);
  if (options.client_optimizer)
    try_client(model_, options.client_optimizer, specs_of(tensors, config_.precision), device_of(module));
  if (!options.output.empty() && model_.rank() == 0) write_resolved(config_, options.output);

  recompute_layers(module, config_.recompute.mode);  // refuses a module without such layers before it changes one
  cast_tensors(tensors, config_.precision);
  aliases_ = std::move(tensors.aliases);
  aliases_.insert(options.aliases.begin(), options.aliases.end());
  const TensorSet parameters = parameters_of(tensors);
  pager_ = std::make_unique<Pager>(group_, make_meshes(), std::move(tensors.parameters), policy);
  give_back_freed_memory();  // the whole model's; malloc would keep it
  buffers_ = std::make_unique<Buffers>(group_, pager_->device(), [list = list_of_buffers(module, options), parameters] {
    return present_buffers(list(), parameters);
  });
  std::unique_ptr<ShardedOptimizer> optimizer;
  if (config_.optimizer) optimizer = std::make_unique<ShardedOptimizer>(*pager_, group_, std::move(grouped));
  if (options.client_optimizer) {
    optimizer = std::make_unique<ShardedOptimizer>(*pager_, group_, options.client_optimizer);
    hyperparameters.emplace(optimizer->client_groups(), schedule);
  }
  optimizer_ = optimizer.get();
  step_ = std::make_unique<TrainStep>(TrainStepParts{.shards = group_,
                                                     .model = model_,
                                                     .place = plan_.place,
                                                     .pager = *pager_,
                                                     .buffers = *buffers_,
                                                     .optimizer = std::move(optimizer),
                                                     .hyperparameters = *std::move(hyperparameters)},
                                      step_options(config_));
  if (config_.checkpoint.async_save) {
    saver_ = std::make_unique<AsyncSaver>(model_);
    saver_->reserve(saved_state(/*with_frozen=*/true));
  }
  access_ = std::make_unique<ParameterAccess>(*pager_, optimizer_, [this] { return loss_scale(); });
  const auto is_own = [pager = pager_.get()](const at::Tensor& tensor) {
    const auto place = find_managed(tensor);
    return place && place->pager == pager;
  };
  if (config_.recompute.mode == RecomputeMode::kSelective)
    recompute_ = std::make_unique<SelectiveRecompute>(config_.recompute.selective, is_own);
  if (config_.tiled.is_on()) tiled_ = std::make_unique<TiledComputation>(config_.tiled, is_own);
  if (Group* const sequence = setup.groups.sequence; sequence != nullptr)
    sequence_ = std::make_unique<SequenceParallel>(group_for(*sequence, device_of(module), device_sequence_group_),
                                                   config_.sequence_attention);
  const bool knows_micro_batch = !std::holds_alternative<std::monostate>(options.config);
  forward_checks_ = std::make_unique<ForwardChecks>(group_, *pager_, *buffers_, config_.precision, knows_micro_batch);
  if (model_.rank() == 0) log(LogLevel::kInfo, dtypes_in_use(config_, *pager_, *buffers_, *step_));
}

std::vector<ShardMesh> Engine::make_meshes() {
  if (plan_.replicas.size() == 1) return {{.shards = group_, .mean_over = plan_.mean_over}};
  const std::vector<int>& own = plan_.sums.of(plan_.rank);
  shards_ = group_.split(positions_in(own, plan_.shards), "shards");
  replicas_ = group_.split(positions_in(own, plan_.replicas), "replicas");
  return {{.shards = *shards_,
           .replicas = replicas_.get(),
           .states_over_replicas = plan_.states_over_replicas,
           .mean_over = plan_.mean_over}};
}

Engine::~Engine() = default;

void Engine::destroy() {
  require_there("destroy");
  const CallerScope caller("destroy");
  pager_->require_free();
  sequence_.reset();
  tiled_.reset();
  recompute_.reset();
  forward_checks_.reset();
  access_.reset();
  saver_.reset();
  optimizer_ = nullptr;
  step_->release();
  pager_->restore();
  pager_.reset();
}

ForwardScope Engine::begin_forward() {
  require_intact("forward");
  step_->tell_missing_step();
  return begin_scheduled_forward();
}

ForwardScope Engine::begin_scheduled_forward() {
  forward_checks_->begin();
  return {config_.precision, pager_->device().type()};
}

void Engine::look_at(const at::Tensor& input) {
  if (forward_checks_) forward_checks_->look_at(input, train_micro_batch_size_per_gpu());
}

void Engine::explain_forward(const std::string& problem, const std::vector<at::ScalarType>& inputs) const {
  if (forward_checks_) forward_checks_->explain(problem, inputs);
}

SequenceInputs Engine::cut(const SequenceInputs& whole) {
  require_alive("cut");
  return sequence_ ? sequence_->cut(whole) : whole;
}

at::Tensor Engine::backward(const at::Tensor& loss, const BackwardOptions& options) {
  require_optimizer("backward");
  check_loss(loss, "backward");
  if (sequence_) check_whole(loss);
  const at::Tensor scaled = step_->scale(loss);
  // The reduction divides by the accumulation steps; who has done so already gets them back here.
  const int64_t accumulation_steps = gradient_accumulation_steps();
  at::Tensor seed;
  if (!options.scale_wrt_gas && accumulation_steps > 1) seed = at::full_like(scaled, accumulation_steps);
  if (!seed.defined()) seed = at::ones_like(scaled);
  step_->tell_missing_step();
  step_->backward_from({torch::autograd::impl::gradient_edge(scaled)}, {seed},
                       {.retain_graph = options.retain_graph, .create_graph = options.create_graph});
  const WithoutInterception own_operators;
  return options.scale_wrt_gas ? loss.detach() / accumulation_steps : loss.detach();
}

/// A part's gradients would be of a part of the loss.
void Engine::check_whole(const at::Tensor& loss) {
  if (sequence_->is_part(loss))
    throw StateError(
        "backward: the loss is of this rank's tokens alone; take the sum() or mean() of all tokens' losses");
  if (!sequence_->has_cut() && !std::exchange(told_uncut_, true) && model_.rank() == 0)
    log(LogLevel::kWarning,
        str("sequence_parallel_size=", config_.degrees.sequence,
            ", and the program has cut no batch: each rank trains on all tokens of its own batch, which saves nothing, "
            "and the ranks' gradients are averaged; pass batches through engine.cut()"));
}

at::Tensor Engine::scale(const at::Tensor& output) const {
  require_optimizer("scale");
  check_has_graph(output, "scale");
  return step_->scale(output);
}

double Engine::loss_scale() const { return step_->loss_scale().value_or(1); }

StepReport Engine::step() {
  require_optimizer("step");
  return step_->step();
}

void Engine::step_without_gradients() {
  require_optimizer("step_without_gradients");
  step_->step_without_gradients();
}

void Engine::zero_grad() {
  require_alive("zero_grad");
  step_->zero_grad();
}

NoSync Engine::no_sync() { return NoSync(*this); }
CoalescedReduction Engine::coalesce_grad_reduction() { return CoalescedReduction(*this); }

void Engine::defer(const char* scope) {
  if (scope != nullptr) require_optimizer(scope);
  step_->defer(scope);
}

bool Engine::is_gradient_accumulation_boundary() const { return step_->is_boundary(); }

void Engine::set_gradient_accumulation_boundary(bool is_boundary) {
  require_optimizer("set_gradient_accumulation_boundary");
  step_->set_boundary(is_boundary);
}

double Engine::get_lr(size_t group) const {
  return group_count() == 0 && group == 0 ? 0 : step_->hyperparameters().of(group, "get_lr").lr;
}

void Engine::set_lr(double lr, std::optional<size_t> group) {
  require_optimizer("set_lr");
  if (!(lr >= 0) || !std::isfinite(lr)) throw ConfigError(str("set_lr: ", lr, " is no learning rate; use 0 or more"));
  Hyperparameters& hyperparameters = step_->known_hyperparameters();
  if (group) (void)hyperparameters.of(*group, "set_lr");
  for (size_t i = 0; i < group_count(); ++i)
    if (!group || i == *group) hyperparameters.set_lr(i, lr);
}

const OptimizerOptions& Engine::hyperparameters(size_t group) const {
  require_optimizer("hyperparameters");
  return step_->hyperparameters().of(group, "hyperparameters");
}

const OptimizerOptions& Engine::known_hyperparameters(size_t group) const {
  require_optimizer("known_hyperparameters");
  return step_->known_hyperparameters().of(group, "known_hyperparameters");
}

// Memory for states is laid out once, by the hyperparameters of initialize().
void Engine::require_states(const OptimizerOptions& options, size_t group) const {
  const size_t wanted = optimizer_states(options).size();
  for (size_t i = 0; i < pager_->parameters().size(); ++i) {
    const int parameter = static_cast<int>(i);
    if (optimizer_->group_of(parameter) != static_cast<int>(group)) continue;
    if (optimizer_->state_names(parameter).size() < wanted)
      throw ConfigError(str("set_hyperparameters: group ", group, " began with momentum=0, so it has no momentum ",
                            "buffer, and now momentum=", options.momentum,
                            "; begin with a momentum above 0, however small, or leave it 0"));
    return;
  }
}

void Engine::set_hyperparameters(const OptimizerOptions& options, size_t group) {
  require_optimizer("set_hyperparameters");
  Hyperparameters& hyperparameters = step_->known_hyperparameters();
  if (const OptimizerOptions& present = hyperparameters.of(group, "set_hyperparameters"); options.kind != present.kind)
    throw ConfigError(str("set_hyperparameters: group ", group, " is updated by ", optimizer_name(present.kind),
                          ", not by ", optimizer_name(options.kind), "; initialize() a new engine for that"));
  check_optimizer(options);
  require_states(options, group);
  hyperparameters.set(group, options);
}

void Engine::set_train_batch_size(int64_t train_batch_size) {
  require_alive("set_train_batch_size");
  const int64_t round = train_micro_batch_size_per_gpu() * config_.degrees.data;
  if (train_batch_size <= 0 || train_batch_size % round != 0)
    throw ConfigError(str("set_train_batch_size: ", train_batch_size, " is not a multiple of micro-batch ",
                          train_micro_batch_size_per_gpu(), " * ", config_.degrees.data, " ranks = ", round),
                      ErrorCode::kBatchSize);
  set_batch("set_train_batch_size", train_micro_batch_size_per_gpu(), train_batch_size / round);
}

void Engine::set_train_micro_batch_size(int64_t micro_batch_size) {
  require_alive("set_train_micro_batch_size");
  if (micro_batch_size < 1)
    throw ConfigError(str("set_train_micro_batch_size: ", micro_batch_size, " is no batch size; use 1 or more"),
                      ErrorCode::kBatchSize);
  set_batch("set_train_micro_batch_size", micro_batch_size, gradient_accumulation_steps());
}

void Engine::set_batch(const char* call, int64_t micro_batch_size, int64_t accumulation_steps) {
  step_->require_no_window(call);
  config_.batch = {.train_batch_size = micro_batch_size * accumulation_steps * config_.degrees.data,
                   .train_micro_batch_size_per_gpu = micro_batch_size,
                   .gradient_accumulation_steps = accumulation_steps};
  step_->set_batch(micro_batch_size, accumulation_steps);
}

std::pair<double, double> Engine::get_mom(size_t group) const {
  require_optimizer("get_mom");
  const Momentum momentum = momentum_of(step_->hyperparameters().of(group, "get_mom"));
  return {momentum.first, momentum.second};
}

Pager& Engine::pager() const {
  require_there("pager");
  return *pager_;
}

int64_t Engine::optimizer_bytes() const {
  return optimizer_ ? optimizer_->master_bytes() + optimizer_->state_bytes() : 0;
}

void Engine::require_there(const char* call) const {
  if (!pager_) throw StateError(str(call, ": the engine was destroyed; initialize() a new one"));
}

void Engine::require_alive(const char* call) const {
  require_there(call);
  if (!failure_.empty())
    throw StateError(str(
        call,
        ": this engine is spent; make a new one with initialize(), and load a checkpoint. It ended with: ", failure_));
}

void Engine::require_intact(const char* call) const {
  require_alive(call);
  if (!torn_load_.empty())
    throw StateError(str(call,
                         ": the last load_checkpoint() ended half-way, so that weights and optimizer states are a ",
                         "mixture; load an intact checkpoint first. It ended with: ", torn_load_));
}

void Engine::require_optimizer(const char* call) const {
  require_intact(call);
  if (!optimizer_)
    throw StateError(
        str(call,
            ": no optimizer is configured, so nothing can be trained; add \"optimizer\": {\"type\": \"AdamW\", "
            "\"params\": {\"lr\": 1e-3}} to the configuration"));
}

}  // namespace trireme
