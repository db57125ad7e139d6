// One training run that features can change, and a record of every step.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/engine/engine.h"
#include "trireme/parallel/exclusions.h"
#include "trireme/pipeline/pipeline_engine.h"
#include "trireme/pipeline/step_engine.h"
#include "trireme/recompute/recompute.h"
#include "trireme/zero.h"

namespace trireme::compose {

enum class Scope { kNone, kNoSync, kCoalesce };
enum class Checkpoint {
  kNone,
  kResume,          ///< saved in the middle, loaded by a new engine
  kResumeOtherWay,  ///< saved in the middle, loaded and saved again by one rank at another stage, loaded by a new
                    ///< engine
  kAsync,           ///< saved in the background while training goes on, then loaded: the steps in between come again
};

using namespace testing;

inline constexpr int kSteps = 2, kAccumulation = 2;
inline constexpr int kSaveAfter = 1;  // steps
inline constexpr double kMaxNorm = 0.5, kLr = 2e-3, kWeightDecay = 0.05, kBeta2 = 0.95, kEps = 1e-3;
inline constexpr double kClientLr = 0.05, kClientMomentum = 0.9;
inline constexpr double kFirstLr = 5e-4, kLrRate = 2;  // of a schedule

/// A run on two data-parallel ranks, or twice as many along each further axis. As it stands: ZeRO stage 0 in fp32 on
/// threads of the host.
struct Scenario {
  Json config;   ///< DeepSpeed's dialect
  int data = 2;  ///< ranks that take different samples
  std::vector<ParameterGroup> parameter_groups = {};
  bool has_client_optimizer = false;  ///< torch::optim's SGD with a momentum, and no `optimizer` section
  RankBackend backend = RankBackend::kThreads;
  bool is_on_device = false;            ///< the stand-in of a GPU for each rank, over NCCL's stand-in
  bool is_initialized_sharded = false;  ///< the model is made under zero::Init
  bool recomputes_by_call = false;      ///< trireme::recompute() around the model
  bool evaluates_between = false;       ///< a forward without gradients after each step
  bool has_second_engine = false;       ///< another model trains in between, sharded and recomputed
  bool has_sequence_parts = false;      ///< each rank has some tokens of each sample
  bool has_slices = false;              ///< each two neighbouring ranks have slices of the same layers
  std::string schedule = {};            ///< of a pipeline of two stages; empty: none
  bool has_step_function = false;       ///< over two stages that own parts of the model as it is
  Scope scope = Scope::kNone;
  Checkpoint checkpoint = Checkpoint::kNone;

  Scenario();
  bool is_in_stages() const { return !schedule.empty() || has_step_function; }
  int slices() const { return has_slices ? 2 : 1; }
  int ranks() const { return data * (is_in_stages() ? 2 : 1) * (has_sequence_parts ? 2 : 1) * slices(); }
  int micro_batches() const { return ranks() * kAccumulation; }  ///< of a step
};

/// The record of one step, on the host.
struct StepRecord {
  double loss = 0;                              ///< the mean over its micro-batches
  double norm = 0;                              ///< of all gradients
  std::map<std::string, at::Tensor> gradients;  ///< before clipping, in fp32
};

/// The same on every rank.
struct Outcome {
  std::vector<StepRecord> steps;
  std::map<std::string, at::Tensor> parameters;
};

/// A Llama whose output layer is its embedding, with two heads for each slice of a layer.
inline LlamaOptions small_tied_llama() {
  LlamaOptions options = small_llama();
  options.num_attention_heads = 4;
  options.tie_word_embeddings = true;
  return options;
}

inline std::shared_ptr<LlamaImpl> make_model() {
  auto net = std::make_shared<LlamaImpl>(small_tied_llama());
  draw_weights(*net);
  return net;
}

/// Micro-batch `number` of the job.
inline trireme::MicroBatch micro_batch(int64_t number, std::optional<int> device = {}) {
  at::Tensor tokens = tokens_of({number, 0}, small_llama().vocab_size, {2, 9});
  if (device) tokens = tokens.to(fake_device(*device));
  return {tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8)};
}

/// Notes of the gradients with which an optimizer of the program's own is stepped.
class Notes {
 public:
  void note(int rank, size_t step, const std::string& name, const at::Tensor& part) {
    const std::lock_guard lock(mutex_);
    if (steps_.size() <= step) steps_.resize(step + 1);
    steps_[step][name][rank] = part.detach().cpu().clone();
  }
  /// The flat gradient of a parameter in a step: the first rank's that has `numel` elements, or all ranks' parts in
  /// `order`.
  at::Tensor whole(size_t step, const std::string& name, int64_t numel, const std::vector<int>& order) const {
    std::vector<at::Tensor> parts;
    for (const int rank : order) {
      const auto found = steps_.at(step).at(name).find(rank);
      if (found == steps_.at(step).at(name).end()) continue;
      if (found->second.numel() == numel) return found->second;
      parts.push_back(found->second);
    }
    return at::cat(parts);
  }

 private:
  std::mutex mutex_;
  std::vector<std::map<std::string, std::map<int, at::Tensor>>> steps_;
};

/// Ranks in the order of their parts of a parameter, or of its slice at `place`.
inline std::vector<int> order_of_parts(const Scenario& scenario, int place = 0) {
  const Json& zero = scenario.config.value("zero_optimization", Json::object());
  if (zero.contains("zero_hpz_partition_size")) return {0, 2, 1, 3};
  if (zero.contains("mics_shard_size")) return {0, 1};
  std::vector<int> order;
  for (int rank = place; rank < scenario.ranks(); rank += scenario.slices()) order.push_back(rank);
  return order;
}

/// The flat gradient of a parameter of which two ranks have slices.
inline at::Tensor joined(const Notes& notes, size_t step, const PartitionedParameter& parameter,
                         const Scenario& scenario) {
  const at::Tensor whole = at::zeros(parameter.parts[0].shape);
  for (int place = 0; place < scenario.slices(); ++place) {
    const TensorPart& part = parameter.parts[place];
    const at::Tensor slice =
        notes.whole(step, parameter.name, local_numel(part), order_of_parts(scenario, place)).view(local_shape(part));
    if (part.dim < 0) whole.copy_(slice);
    int64_t begin = 0;
    for (const Interval& own : part.intervals) {
      whole.narrow(part.dim, own.begin, own.size()).copy_(slice.narrow(part.dim, begin, own.size()));
      begin += own.size();
    }
  }
  return whole.flatten();
}

/// torch::optim's SGD, which tells its gradients.
class NotedSgd final : public torch::optim::SGD {
 public:
  NotedSgd(const std::vector<at::Tensor>& parts, std::vector<std::string> names, Notes& notes, int rank)
      : SGD(parts, torch::optim::SGDOptions(kClientLr).momentum(kClientMomentum)),
        parts_(parts),
        names_(std::move(names)),
        notes_(notes),
        rank_(rank) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    bool is_training = false;  // gradients of zeros make an optimizer's states before they are saved or loaded
    for (const at::Tensor& part : parts_) is_training |= part.grad().defined() && part.grad().any().item<bool>();
    for (size_t i = 0; is_training && i < parts_.size(); ++i)
      if (parts_[i].grad().defined()) notes_.note(rank_, step_, names_[i], parts_[i].grad());
    step_ += is_training ? 1 : 0;
    return SGD::step(closure);
  }

 private:
  const std::vector<at::Tensor> parts_;
  const std::vector<std::string> names_;
  Notes& notes_;
  const int rank_;
  size_t step_ = 0;
};

/// Units that are released as soon as they may be, and NaNs in released memory.
inline Config config_of(const Scenario& scenario) {
  Json json = scenario.config;
  json["gradient_accumulation_steps"] = scenario.micro_batches() / scenario.data;
  if (scenario.is_in_stages()) json["pipeline"] = {{"stages", 2}};
  if (scenario.has_sequence_parts) json["sequence_parallel_size"] = 2;
  if (scenario.has_slices) json["tensor_parallel"] = {{"autotp_size", 2}};
  Config config = config_from_json(json, scenario.ranks(), {}, "ds_config.json");
  config.pager.poison = true;
  config.pager.live_bytes = 0;
  config.pager.units.merge_below_bytes = 0;
  return config;
}

/// An engine that a model's own forward() runs in.
class OpenEngine final : public Engine {
 public:
  using Engine::begin_forward;
  using Engine::Engine;
  using Engine::training;
};

/// A model and its engine on one rank.
class Training {
 public:
  virtual ~Training() = default;
  virtual EngineBase& engine() = 0;
  /// This rank's part of the model.
  virtual const torch::nn::Module& module() const = 0;
  /// How layers are cut; null: they are not.
  virtual const PartitionPlan* partition() const { return nullptr; }
  /// One window. Returns the mean loss of all micro-batches.
  virtual double step(int number) = 0;
  virtual void load_checkpoint(const std::filesystem::path& folder, const std::string& tag) = 0;
};

/// The answers of `Own`'s engine_.
template <class Own>
class TrainingBy : public Training {
 public:
  EngineBase& engine() override { return own().engine_; }
  const PartitionPlan* partition() const override { return own().engine_.training().partition(); }
  void load_checkpoint(const std::filesystem::path& folder, const std::string& tag) override {
    own().engine_.load_checkpoint(folder, {.tag = tag});
  }

 private:
  Own& own() { return static_cast<Own&>(*this); }
  const Own& own() const { return static_cast<const Own&>(*this); }
};

inline std::unique_ptr<Group> device_group(const Scenario& scenario, Group& world, int device) {
  return scenario.is_on_device ? make_fake_nccl_group(world, fake_device(device)) : nullptr;
}

inline std::shared_ptr<LlamaImpl> model_of(const Scenario& scenario, Group& world, int device) {
  std::shared_ptr<LlamaImpl> model;
  {
    std::optional<zero::Init> init;
    if (scenario.is_initialized_sharded) init.emplace(world, zero::InitPolicy{.smallest_bytes = 0, .live_bytes = 0});
    model = make_model();
  }
  if (scenario.is_initialized_sharded && scenario.is_on_device)  // as programs do that bring a model to a GPU
    for (const at::Tensor& parameter : model->parameters()) zero::make_whole(parameter);
  if (scenario.is_on_device) move_to_fake(*model, fake_device(device));
  return model;
}

inline InitializeOptions options_of(const Scenario& scenario, const Group& world, Notes& notes) {
  InitializeOptions options{.config = config_of(scenario), .parameter_groups = scenario.parameter_groups};
  options.partition_model = PartitionModel{.model_type = "llama",
                                           .heads = small_tied_llama().num_attention_heads,
                                           .key_value_heads = small_tied_llama().num_key_value_heads};
  options.takes_sizes_from_inputs = scenario.has_sequence_parts && scenario.has_slices;
  if (scenario.has_client_optimizer)
    options.client_optimizer = [&notes, rank = world.rank()](const std::vector<at::Tensor>& parts,
                                                             const std::vector<std::string>& names) {
      return std::make_unique<NotedSgd>(parts, names, notes, rank);
    };
  return options;
}

class WholeTraining final : public TrainingBy<WholeTraining> {
 public:
  WholeTraining(const Scenario& scenario, Group& world, int device, Notes& notes)
      : scenario_(scenario),
        device_(scenario.is_on_device ? std::optional(device) : std::nullopt),
        group_(device_group(scenario, world, device)),
        model_(model_of(scenario, world, device)),
        engine_(group_ ? *group_ : world, *model_, options_of(scenario, world, notes)) {}

  const torch::nn::Module& module() const override { return *model_; }

  double step(int number) override {
    double sum = 0;
    const DataPlace place = engine_.data_place();
    const int64_t rounds = engine_.gradient_accumulation_steps();
    for (int64_t i = 0; i < rounds; ++i) {
      sum += backward(micro_batch((number * rounds + i) * place.size + place.rank, device_), i + 1 < rounds);
      engine_.step();
    }
    if (scenario_.evaluates_between) {
      const torch::NoGradGuard no_grad;
      (void)forward(micro_batch(1000, device_));
    }
    const at::Tensor total = at::tensor({sum}, at::kDouble);
    engine_.group().all_reduce(total).wait();
    return total.item<double>() / static_cast<double>(rounds * engine_.group().size());
  }

 private:
  friend TrainingBy<WholeTraining>;
  at::Tensor forward(const trireme::MicroBatch& batch) {
    ForwardScope scope = engine_.begin_forward();
    SequenceInputs in{.input_ids = batch.inputs.toTensor(), .labels = batch.labels.toTensor()};
    if (scenario_.has_sequence_parts) {
      in.position_ids = at::arange(in.input_ids.size(1), in.input_ids.options()).unsqueeze(0);
      in = engine_.cut(in);
    }
    const auto loss = [model = model_, in] { return model->loss(in.input_ids, in.labels, in.position_ids); };
    if (!scenario_.recomputes_by_call) return loss();
    return recompute([loss](const at::Tensor&) { return loss(); }, at::empty({0}));
  }

  double backward(const trireme::MicroBatch& batch, bool more_follows) {
    const at::Tensor loss = forward(batch);
    if (scenario_.scope == Scope::kNoSync && more_follows) {
      const NoSync scope = engine_.no_sync();
      engine_.backward(loss);
    } else if (scenario_.scope == Scope::kCoalesce) {
      CoalescedReduction scope = engine_.coalesce_grad_reduction();
      engine_.backward(loss);
      scope.close();
    } else {
      engine_.backward(loss);
    }
    return loss.item<double>();
  }

  const Scenario& scenario_;
  const std::optional<int> device_;
  const std::unique_ptr<Group> group_;
  const std::shared_ptr<LlamaImpl> model_;
  OpenEngine engine_;
};

/// The layers of the same model, with its weights.
inline std::vector<LayerSpec> layers_of(const Scenario& scenario, const torch::nn::Module& model, int device) {
  std::vector<LayerSpec> specs;
  const auto weights = std::make_shared<std::map<std::string, at::Tensor>>(parameters_of(model));
  for (const ModelLayer& layer : llama_layers(small_tied_llama())) {
    LayerSpec& spec = specs.emplace_back();
    spec.type = layer.type;
    spec.name = layer.name;
    if (layer.is_tied) spec.tie = "embedding";
    spec.make = [=, is_on_device = scenario.is_on_device] {
      const torch::NoGradGuard no_grad;
      auto module = layer.make();
      for (auto& item : module->named_parameters())
        item.value().copy_(weights->at(layer.is_tied ? "model.embed_tokens.weight" : layer.name + "." + item.key()));
      if (is_on_device) move_to_fake(*module, fake_device(device));
      return module;
    };
    spec.forward = [layer, recomputes = scenario.recomputes_by_call](torch::nn::Module* module,
                                                                     const c10::IValue& value) {
      if (!recomputes) return run_layer(layer, *module, value);
      const bool is_pair = value.isTuple();
      const at::Tensor x = is_pair ? value.toTupleRef().elements()[0].toTensor() : value.toTensor();
      const at::Tensor positions = is_pair ? value.toTupleRef().elements()[1].toTensor() : at::Tensor();
      const at::Tensor result =
          recompute([=](const at::Tensor& again) { return layer.forward(*module, again, positions); }, x);
      return is_pair && !layer.is_last ? c10::IValue(std::make_tuple(result, positions)) : c10::IValue(result);
    };
  }
  return specs;
}

inline PipelineModule stages_of(const Scenario& scenario, int device) {
  PipelineModuleOptions cut;
  cut.stages = 2;
  cut.schedule = scenario.schedule;
  if (scenario.schedule == "interleaved" || scenario.schedule == "zb-v") cut.chunks = 2;
  if (scenario.is_initialized_sharded) cut.sharded_init = {.smallest_bytes = 0, .live_bytes = 0};
  cut.loss = [](const c10::IValue& logits, const c10::IValue& targets) {
    return at::cross_entropy_loss(logits.toTensor().flatten(0, 1).to(at::kFloat), targets.toTensor().flatten());
  };
  return PipelineModule(layers_of(scenario, *make_model(), device), cut);
}

template <class AnyEngine>
concept has_scopes = requires(AnyEngine& engine) {
  engine.no_sync();
  engine.coalesce_grad_reduction();
};

/// A pipeline's engine of which a test sees how its layers are cut.
class OpenPipelineEngine final : public PipelineEngine {
 public:
  using PipelineEngine::PipelineEngine;
  using PipelineEngine::training;
};

class StagedTraining final : public TrainingBy<StagedTraining> {
 public:
  StagedTraining(const Scenario& scenario, Group& world, int device, Notes& notes)
      : scenario_(scenario),
        device_(device),
        group_(device_group(scenario, world, device)),
        engine_(group_ ? *group_ : world, stages_of(scenario, device), options_of(scenario, world, notes)) {}

  const torch::nn::Module& module() const override { return engine_.module(); }

  double step(int number) override {
    const double loss = train(batches_of(number)).item<double>();
    const auto device = scenario_.is_on_device ? std::optional(device_) : std::nullopt;
    if (scenario_.evaluates_between)
      (void)engine_.eval_batch([&] { return std::optional(staged(micro_batch(1000, device))); });
    return loss;
  }

  /// Those of step `number`, on this rank's device.
  MicroBatches batches_of(int number) const {
    const auto device = scenario_.is_on_device ? std::optional(device_) : std::nullopt;
    std::vector<trireme::MicroBatch> all;
    const DataPlace place = engine_.data_place();
    for (int64_t i = place.rank; i < scenario_.micro_batches(); i += place.size)
      all.push_back(staged(micro_batch(number * scenario_.micro_batches() + i, device)));
    return [all, next = size_t{0}]() mutable { return std::optional(all[next++]); };
  }
  /// The loss of a step, for which the host has not waited.
  at::Tensor train(const MicroBatches& batches) {
    static_assert(!has_scopes<PipelineEngine> && has_scopes<Engine>);
    if (scenario_.scope != Scope::kNone) throw StateError(kNoScope);
    return engine_.train_batch(batches);
  }

 private:
  /// With positions, where each rank has a part of them.
  trireme::MicroBatch staged(trireme::MicroBatch batch) const {
    if (!scenario_.has_sequence_parts) return batch;
    const at::Tensor ids = batch.inputs.toTensor();
    batch.inputs = c10::IValue(std::make_tuple(ids, at::arange(ids.size(1), ids.options()).unsqueeze(0)));
    return batch;
  }
  friend TrainingBy<StagedTraining>;
  const Scenario& scenario_;
  const int device_;
  const std::unique_ptr<Group> group_;
  OpenPipelineEngine engine_;
};

/// A step function's engine, as OpenEngine.
class OpenStepEngine final : public StepEngine {
 public:
  using StepEngine::StepEngine;
  using StepEngine::training;
};

class StepTraining final : public TrainingBy<StepTraining> {
 public:
  StepTraining(const Scenario& scenario, Group& world, int device, Notes& notes)
      : scenario_(scenario),
        device_(scenario.is_on_device ? std::optional(device) : std::nullopt),
        group_(device_group(scenario, world, device)),
        model_(model_of(scenario, world, device)),
        engine_(group_ ? *group_ : world, topology_of(scenario), *model_, stage_of, {},
                options_of(scenario, world, notes)) {}

  const torch::nn::Module& module() const override { return engine_.module(); }

  double step(int number) override {
    if (scenario_.scope != Scope::kNone) throw StateError(kNoScopeInSteps);
    const auto rounds = static_cast<int>(engine_.gradient_accumulation_steps());
    const DataPlace place = engine_.data_place();
    const auto outputs = engine_.step(rounds, [&](int micro_batch_number) {
      const at::Tensor loss = loss_of((number * rounds + micro_batch_number) * place.size + place.rank);
      engine_.backward(loss);
      return std::vector{loss};
    });
    engine_.update();
    if (scenario_.evaluates_between)
      (void)engine_.step(1, [&](int) {
        const torch::NoGradGuard no_grad;
        return std::vector{loss_of(1000)};
      });
    double sum = 0;
    for (const auto& of_micro_batch : outputs) sum += of_micro_batch.at(0).item<double>();
    const at::Tensor total = at::tensor({sum}, at::kDouble);
    engine_.group().all_reduce(total).wait();
    return total.item<double>() / static_cast<double>(rounds * engine_.group().size());
  }

 private:
  friend TrainingBy<StepTraining>;
  static Topology topology_of(const Scenario& scenario) {
    std::vector<Axis> axes{{"pipe", 2}, {"data", scenario.data}};
    if (scenario.has_sequence_parts) axes.push_back({"sequence", 2});
    if (scenario.has_slices) axes.push_back({"tensor", 2});
    return Topology(axes);
  }
  /// The first layer beside the embedding, which is the output layer, too: the program comes back to its stage.
  static int stage_of(const std::string& name) { return name.find("layers.1.") != std::string::npos ? 1 : 0; }
  at::Tensor loss_of(int64_t number) {
    const trireme::MicroBatch batch = micro_batch(number, device_);
    const at::Tensor tokens = batch.inputs.toTensor(), labels = batch.labels.toTensor();
    const auto loss = [model = model_, tokens, labels] { return model->loss(tokens, labels); };
    if (!scenario_.recomputes_by_call) return loss();
    return recompute([loss](const at::Tensor&) { return loss(); }, at::empty({0}));
  }

  const Scenario& scenario_;
  const std::optional<int> device_;
  const std::unique_ptr<Group> group_;
  const std::shared_ptr<LlamaImpl> model_;
  OpenStepEngine engine_;
};

inline std::unique_ptr<Training> make_training(const Scenario& scenario, Group& world, int device, Notes& notes) {
  if (scenario.has_step_function) return std::make_unique<StepTraining>(scenario, world, device, notes);
  if (scenario.is_in_stages()) return std::make_unique<StagedTraining>(scenario, world, device, notes);
  return std::make_unique<WholeTraining>(scenario, world, device, notes);
}

/// Trains beside the other engine of its rank and asks for everything that could get in its way.
class SecondTraining {
 public:
  explicit SecondTraining(Group& world) : model_(make_mlp()) {
    Config config = default_config(world.size());
    config.optimizer = OptimizerOptions{.lr = 1e-2};
    config.pager = harsh_policy(3, GatherPolicy::kCopy);
    config.recompute.mode = RecomputeMode::kSelective;
    engine_.emplace(world, *model_.module, InitializeOptions{.config = config});
  }
  void step(int number) {
    engine_->backward(model_.loss({number, number}));
    engine_->step();
  }

 private:
  TrainedModel model_;
  std::optional<Engine> engine_;
};

/// Loads what all ranks have saved on one rank and at another stage, and saves it again.
inline void save_again_on_one_rank(const Scenario& scenario, const std::filesystem::path& folder) {
  Scenario other = scenario;
  other.backend = RankBackend::kThreads;
  other.is_on_device = false;
  other.is_initialized_sharded = false;
  other.config["zero_optimization"] = {{"stage", 1}};
  other.config.erase("trireme");
  other.data = 1;
  other.has_sequence_parts = false;
  other.has_slices = false;
  other.has_step_function = false;
  other.schedule = {};
  Notes notes;
  run_ranks(1, [&](Rank& rank) {
    const auto training = make_training(other, rank.world(), 0, notes);
    training->load_checkpoint(folder, "first");
    training->engine().save_checkpoint(folder, {.tag = "second"});
    training->engine().destroy();
  });
}

/// The optimizer's state that is a parameter's clipped gradient, since its decay is 0.
inline const char* gradient_state(const Scenario& scenario, const std::string& name, const at::Tensor& parameter) {
  const bool is_muons = scenario.config.at("optimizer").at("type") == "Muon" && parameter.dim() == 2 &&
                        name.find("embed") == std::string::npos;
  return is_muons ? "momentum_buffer" : "exp_avg";
}

inline void undo_clipping(StepRecord& record) {
  const double factor = std::max(1.0, (record.norm + 1e-6) / kMaxNorm);
  for (auto& [name, gradient] : record.gradients) gradient = gradient * factor;
}

/// The step that `training` has made last, but for its loss and, with an optimizer of the program's own, the gradients.
/// Of this rank's stage.
inline StepRecord last_step(const Scenario& scenario, Training& training) {
  StepRecord record;
  record.norm = training.engine().get_global_grad_norm().value_or(-2);
  if (scenario.has_client_optimizer) return record;
  for (const auto& item : training.module().named_parameters())
    if (find_managed(item.value()))
      record.gradients[item.key()] =
          safe_get_full_optimizer_state(item.value(), gradient_state(scenario, item.key(), item.value()))->cpu();
  return record;
}

/// Steps [begin, end) on all ranks, by a training that `prepare` and `finish` see before and after.
using Look = std::function<void(Training&, int rank)>;
inline void train_part(const Scenario& scenario, int begin, int end, const Look& prepare, const Look& finish,
                       Outcome& outcome) {
  FakeRecord device_record;
  Notes notes;
  std::mutex mutex;
  std::vector<PartitionedParameter> slices;
  outcome.steps.resize(end);
  run_ranks(scenario.ranks(),
            [&](Rank& rank) {
              at::set_num_threads(1);
              std::optional<SecondTraining> second;
              const auto training = make_training(scenario, rank.world(), rank.id(), notes);
              if (scenario.has_second_engine) second.emplace(rank.world());
              if (scenario.has_slices != (training->partition() != nullptr))
                throw Error(ErrorCode::kInternal, "layers are cut, or not, as nobody has asked");
              prepare(*training, rank.id());
              for (int number = begin; number < end; ++number) {
                if (second) second->step(number);
                const double loss = training->step(number);
                StepRecord record = last_step(scenario, *training);
                const std::lock_guard lock(mutex);
                if (rank.id() != 0 && !scenario.is_in_stages()) continue;
                outcome.steps[number].loss = loss;
                outcome.steps[number].norm = record.norm;
                outcome.steps[number].gradients.merge(record.gradients);
              }
              finish(*training, rank.id());
              training->engine().destroy();
              const std::lock_guard lock(mutex);
              if (const PartitionPlan* const cut = training->partition(); cut != nullptr)
                slices.insert(slices.end(), cut->parameters.begin(), cut->parameters.end());
              if (rank.id() == 0 || scenario.is_in_stages())
                for (const auto& [name, tensor] : parameters_of(training->module()))
                  outcome.parameters[name] = tensor.cpu();
            },
            {.backend = scenario.backend, .timeout = std::chrono::seconds(20)});
  if (const auto races = device_record.races(); !races.empty())
    throw Error(ErrorCode::kInternal, "not ordered: " + races[0]);
  for (int number = begin; number < end; ++number) {
    StepRecord& record = outcome.steps[number];
    if (scenario.has_client_optimizer && !slices.empty())
      for (const PartitionedParameter& parameter : slices)
        record.gradients[parameter.name] =
            joined(notes, number - begin, parameter, scenario).view(parameter.parts.front().shape);
    else if (scenario.has_client_optimizer)
      for (const auto& [name, tensor] : outcome.parameters)
        if (name != "lm_head.weight")
          record.gradients[name] =
              notes.whole(number - begin, name, tensor.numel(), order_of_parts(scenario)).view(tensor.sizes());
    undo_clipping(record);
  }
}

inline Scenario::Scenario()
    : config{{"train_micro_batch_size_per_gpu", 2},
             {"gradient_clipping", kMaxNorm},
             {"optimizer",
              {{"type", "AdamW"},
               {"params", {{"lr", kLr}, {"weight_decay", kWeightDecay}, {"betas", {0, kBeta2}}, {"eps", kEps}}}}}} {}

/// Trains a small Llama, with one gradient record for each step.
/// Throws    what the engine or the configuration's reader refuses, as a user sees it; Error: accesses that no stream
///           or event orders (on the device's stand-in).
inline Outcome train(const Scenario& scenario) {
  Outcome outcome;
  const Look nothing = [](Training&, int) {};
  if (scenario.checkpoint == Checkpoint::kNone) {
    train_part(scenario, 0, kSteps, nothing, nothing, outcome);
    return outcome;
  }
  const TemporaryFolder folder;
  const bool is_async = scenario.checkpoint == Checkpoint::kAsync;
  const Look save = [&](Training& training, int) {
    training.engine().save_checkpoint(folder.path(), {.tag = "first", .async_save = is_async});
    if (!is_async) return;
    training.step(kSaveAfter);  // while the checkpoint is written
    training.engine().wait_for_checkpoint();
  };
  train_part(scenario, 0, kSaveAfter, nothing, save, outcome);
  if (scenario.checkpoint == Checkpoint::kResumeOtherWay) save_again_on_one_rank(scenario, folder.path());
  const std::string tag = scenario.checkpoint == Checkpoint::kResumeOtherWay ? "second" : "first";
  const Look load = [&](Training& training, int) { training.load_checkpoint(folder.path(), tag); };
  train_part(scenario, kSaveAfter, kSteps, load, nothing, outcome);
  return outcome;
}

}  // namespace trireme::compose
