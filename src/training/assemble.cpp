// How a Training is put together: first all that can be refused, then what changes the module.
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "training/forward_checks.h"
#include "training/gradient_proof.h"
#include "training/module_tensors.h"
#include "training/optimizer_choice.h"
#include "training/precision_table.h"
#include "training/program_slices.h"
#include "training/recompute_layers.h"
#include "training/sequence_tensor_passes.h"
#include "training/stage_tensors.h"
#include "training/tensor_slices.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/heap.h"
#include "trireme/base/log.h"
#include "trireme/checkpoint/async_save.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"
#include "trireme/observe/observation.h"
#include "trireme/observe/run_status.h"
#include "trireme/pager/leaf_modules.h"
#include "trireme/tensor/tensor_parallel.h"
#include "trireme/training/model_agreement.h"
#include "trireme/training/training.h"

namespace trireme {

namespace {

void write_resolved(const Config& config, const std::filesystem::path& directory) {
  FileSystem& files = posix_file_system();
  files.create_directories(directory);
  write_file_atomically(files, directory / "resolved_config.json", to_text(config));
}

/// As the parameters will be when they are cast.
std::vector<ParameterSpec> specs_of(const ModuleTensors& tensors, const PrecisionOptions& precision) {
  std::vector<ParameterSpec> specs;
  for (const NamedParameter& parameter : tensors.parameters)
    specs.push_back({parameter.name, parameter.tensor.sizes().vec(), dtype_of_weight(parameter.tensor, precision),
                     parameter.tensor.requires_grad()});
  return specs;
}

OptimizerChoice choice_of(const Config& config, const TrainingOptions& options) {
  return {.optimizer = config.optimizer,
          .parameter_groups = options.parameter_groups,
          .client = options.client_optimizer,
          .schedule = config.scheduler.value_or(LrScheduleOptions{})};
}

std::function<PresentBuffers()> list_of_buffers(const torch::nn::Module& module, const TrainingOptions& options) {
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
          .may_fail_alone = config.disk.is_on() || config.pager.disk.is_on(),
          .precision = config.precision};
}

ParallelOptions parallel_options(const Config& config, const TrainingOptions& options) {
  ParallelOptions parallel = trireme::parallel_options(config);
  parallel.takes_sizes_from_inputs = options.takes_sizes_from_inputs;
  parallel.has_ownership = options.has_ownership;
  return parallel;
}

int64_t elements_of(const WholeModel& model) {
  int64_t count = 0;
  for (const ParameterSpec& parameter : model.parameters) count += c10::multiply_integers(parameter.shape);
  return count;
}

c10::Device device_of(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) return parameter.device();
  return c10::Device(c10::kCPU);
}

PagerPolicy policy_for(const Config& config, const ParallelPlan& plan, torch::nn::Module& module) {
  PagerPolicy policy = config.pager;
  const bool on_disk = config.disk.is_on() || policy.disk.is_on();
  if (on_disk && is_host(device_of(module))) policy.offload_ratio = 0;  // from memory to the disk
  policy.gradient_op = plan.reduce_op;
  policy.units.leaves = find_leaf_modules(module, config.leaf_modules);
  policy.accumulation_dtype = config.precision.accumulation_dtype;
  return policy;
}

}  // namespace

namespace {

Config config_of_options(const TrainingOptions& options, int world_size) {
  if (std::holds_alternative<std::monostate>(options.config)) return default_config(world_size, options.degrees);
  if (const auto* path = std::get_if<std::filesystem::path>(&options.config))
    return read_config(*path, world_size, options.degrees);
  Config config = std::get<Config>(options.config);
  const Config resolved = config_from_json(to_json(config), world_size, config.degrees, "<string>");
  config.degrees = resolved.degrees;
  config.tensor.autotp_size = resolved.tensor.autotp_size;
  return config;
}

}  // namespace

Config resolved_config(const TrainingOptions& options, int world_size) {
  Config config = config_of_options(options, world_size);
  if (config.observe.record.empty() && !options.has_record)
    config.observe.record = environment("TRIREME_RECORD").value_or("");
  return config;
}

Training::Training(Group& group, torch::nn::Module& module, const TrainingOptions& options)
    : config_(resolved_config(options, group.size())),
      groups_(groups_of(group, parallel_options(config_, options), device_of(module))) {
  assemble(module, options);
}

Training::Training(const Grid& grid, torch::nn::Module& module, const TrainingOptions& options)
    : config_(resolved_config(options, grid.world().size())),
      groups_(groups_of(grid, parallel_options(config_, options), device_of(module))) {
  assemble(module, options);
}

void Training::assemble(torch::nn::Module& module, const TrainingOptions& options) {
  const CallerScope caller("initialize");
  const WithoutInterception own_operators;
  check_same_config(groups_.model, config_);
  check_precision(config_.precision);
  if (config_.flops_profiler.enabled && !options.has_flops_profiler && !options.engine_counts_flops)
    throw ConfigError(
        "`flops_profiler.enabled` = true is not there yet for this engine: remove it or set it to false, and count by "
        "trireme::WorkCount (trireme/observe/work_count.h)",
        ErrorCode::kUnsupported);
  const OptimizerChoice choice = choice_of(config_, options);
  check(choice, groups_.plan, config_.precision, config_.disk, config_.pager.disk);
  ModuleTensors tensors = list_tensors(module, config_.precision, options.unmanaged);
  const std::vector<ParameterSpec> specs = specs_of(tensors, config_.precision);
  loaded_bytes_ = bytes_by_dtype(tensors.parameters);
  const WholeModel model = whole_model(groups_.stages, specs);
  PreparedOptimizer prepared = prepare(choice, model, specs.size());
  const PagerPolicy policy = policy_for(config_, groups_.plan, module);
  check_manageable(groups_.sums, tensors.parameters, policy);
  check_same_model(groups_.stage, tensors);
  if (groups_.along(model_axis().name) != nullptr)
    program_slices_ = plan_of_program(groups_, tensors, options);
  else if (groups_.slices != nullptr)
    partition_ = plan_slices(groups_, tensors, config_, options);
  try_client(groups_.model, choice, specs, device_of(module));
  if (options.prepare) options.prepare(config_, groups_.model);
  if (!options.output.empty() && groups_.model.rank() == 0) write_resolved(config_, options.output);

  observe(device_of(module));
  counts_ = std::make_shared<StepCounts>();
  recompute_layers(module, config_.recompute.mode);  // refuses a module without such layers before it changes one
  first_parameter_ = model.first;
  if (!program_slices_) parameter_count_ = elements_of(model);
  manage(module, std::move(tensors), options, policy);
  if (observation_) observation_->follow(pager_.get());
  if (!prepared.is_empty()) install(std::move(prepared));
  reserve_save();
  const bool knows_micro_batch = !std::holds_alternative<std::monostate>(options.config);
  forward_checks_ =
      std::make_unique<ForwardChecks>(groups_.sums, *pager_, *buffers_, config_.precision, knows_micro_batch);
  tell_status(pager_->device(), options.output);
  if (groups_.model.rank() == 0) log_precision(loaded_bytes_, config_, *pager_, *buffers_, *step_);
}

/// Throws on every rank where one cannot make its files.
void Training::observe(c10::Device device) {
  if (config_.observe == ObserveOptions{}) return;
  const int rank = groups_.model.world_rank(groups_.model.rank());
  together(groups_.model, [&] { observation_ = std::make_unique<Observation>(config_.observe, rank, device); });
  if (config_.observe.dump_state && rank == 0) log(LogLevel::kInfo, "configuration:\n" + to_text(config_));
}

/// From here on the module's parameters are the pager's.
void Training::manage(torch::nn::Module& module, ModuleTensors tensors, const TrainingOptions& options,
                      PagerPolicy policy) {
  // First, since a cast makes parameters whole that zero::Init has sharded.
  if (program_slices_)
    for (size_t i = 0; i < tensors.parameters.size(); ++i)
      set_part(tensors.parameters[i], program_slices_->parameters[i].parts, groups_.slices->rank());
  if (partition_) cut_parameters(groups_, *partition_, config_.precision, tensors.parameters);
  cast_tensors(tensors, config_.precision);
  aliases_ = std::move(tensors.aliases);
  aliases_.insert(options.aliases.begin(), options.aliases.end());
  const TensorSet parameters = parameters_of(tensors);
  if (partition_) {
    slices_ = tensors.parameters;
    const std::span copies = std::span(partition_->parameters).subspan(slices_.size());
    for (NamedParameter& copy : cut_copies(groups_.slices->rank(), copies, options.copies, module, config_.precision))
      slices_.push_back(std::move(copy));
  }
  pager_ =
      std::make_unique<Pager>(groups_.sums, make_meshes(groups_), std::move(tensors.parameters), std::move(policy));
  give_back_freed_memory();  // the whole model's; malloc would keep it
  buffers_ = std::make_unique<Buffers>(
      groups_.stage, pager_->device(),
      [list = list_of_buffers(module, options), parameters] { return present_buffers(list(), parameters); },
      [this](const at::Tensor& tensor) { return passes_.is_part(tensor); });
  const LrScheduleOptions schedule = config_.scheduler.value_or(LrScheduleOptions{});
  // A program that says itself when a window ends has batches of which no configuration tells the size.
  const bool knows_samples = config_.managed_gradient_accumulation && !options.has_ownership;
  step_ = std::make_unique<TrainStep>(
      TrainStepParts{.shards = groups_.sums,
                     .model = groups_.model,
                     .place = groups_.plan.place,
                     .pager = *pager_,
                     .buffers = *buffers_,
                     .hyperparameters = Hyperparameters({}, schedule),
                     .prove = proof(),
                     .spoil = [this](const std::string& why) { condition_.fail(why); },
                     .ended =
                         [counts = counts_, knows_samples](const TrainingProgress& progress) {
                           counts->note_window(progress.global_steps, knows_samples ? progress.global_samples : 0);
                         }},
      step_options(config_));
  passes_ = OperatorPasses(config_, *pager_);
  passes_.cuts = partition_ ? passes_on_slices(groups_, config_, options, *partition_, slices_)
                            : passes_on_whole_layers(groups_, config_);
  access_ = make_access(nullptr);
}

/// The proof of the gradients, before the first update; empty: no two ranks have the same parameter but by its shards.
std::function<void()> Training::proof() {
  std::vector<std::function<void()>> proofs;
  if (groups_.replicas != nullptr)
    proofs.emplace_back([proof = ReplicaProof(*pager_, *groups_.replicas, groups_.model)]() mutable { proof.show(); });
  if (groups_.slices != nullptr)
    proofs.emplace_back([this, proof = std::shared_ptr<GradientProof>()]() mutable {  // of passes made after the step
      if (!proof)
        proof = std::make_shared<GradientProof>(
            *pager_, groups_.sums, *groups_.slices, groups_.model, groups_.plan.slices.axes.front(),
            partition_ ? *partition_ : *program_slices_, passes_.find<TensorParallel>());
      proof->show();
    });
  if (proofs.empty()) return {};
  return [proofs = std::move(proofs)] {
    for (const auto& show : proofs) show();
  };
}

void Training::install(PreparedOptimizer prepared) {
  std::unique_ptr<ShardedOptimizer> optimizer =
      make_optimizer(prepared, *pager_, groups_.sums, config_.precision, config_.disk);
  Hyperparameters hyperparameters = hyperparameters_of(prepared, optimizer.get());
  step_->set_optimizer(std::move(optimizer), std::move(hyperparameters));
  access_.reset();  // before another one takes its place in the pager
  access_ = make_access(step_->optimizer());
}

std::unique_ptr<ParameterAccess> Training::make_access(ShardedOptimizer* optimizer) const {
  CutLayers layers{.ranks = partition_ ? groups_.slices : nullptr};
  if (partition_)
    for (const PartitionedParameter& parameter : partition_->parameters) layers.parts.push_back(parameter.parts);
  std::function<double()> loss_scale;
  if (optimizer != nullptr) loss_scale = [this] { return step_->loss_scale().value_or(1); };
  return std::make_unique<ParameterAccess>(*pager_, optimizer, std::move(loss_scale), std::move(layers));
}

void Training::set_optimizer(const OptimizerChoice& choice) {
  condition_.require_intact("set_optimizer");
  step_->require_ready_for_optimizer();
  if (choice.is_empty()) throw ConfigError("set_optimizer: neither an optimizer nor a client's; name one of the two");
  const CallerScope caller("set_optimizer");
  const WithoutInterception own_operators;
  check(choice, groups_.plan, config_.precision, config_.disk, config_.pager.disk);
  const std::vector<ParameterSpec>& specs = pager_->parameters();
  PreparedOptimizer prepared = prepare(choice, whole_model(groups_.stages, specs), specs.size());
  try_client(groups_.model, choice, specs, pager_->device());
  config_.optimizer = choice.optimizer;
  config_.scheduler = choice.schedule;
  if (choice.loss_scale) {
    step_->set_loss_scale(*choice.loss_scale);
    config_.precision.loss_scale = choice.loss_scale->options;
  }
  install(std::move(prepared));
  reserve_save();
  if (groups_.model.rank() == 0) log_precision(loaded_bytes_, config_, *pager_, *buffers_, *step_);
}

/// Memory for saves in the background, before the first one.
void Training::reserve_save() {
  if (!config_.checkpoint.async_save) return;
  if (!saver_) saver_ = std::make_unique<AsyncSaver>(groups_.model);
  saver_->reserve(saved_state(/*with_frozen=*/true));
}

}  // namespace trireme
