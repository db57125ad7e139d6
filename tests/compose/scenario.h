// One training run that features can change, and what it leaves.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/optim/adamw.h>

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
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/engine/engine.h"
#include "trireme/recompute/recompute.h"
#include "trireme/stages/pipeline_engine.h"
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

/// A run on two ranks. As it stands: ZeRO stage 0 in fp32 on threads of the host.
struct Scenario {
  Json config;  ///< DeepSpeed's dialect, for two ranks
  std::vector<ParameterGroup> parameter_groups = {};
  bool has_client_optimizer = false;  ///< torch::optim's AdamW, and no `optimizer` section
  RankBackend backend = RankBackend::kThreads;
  bool is_on_device = false;            ///< the stand-in of a GPU for each rank, over NCCL's stand-in
  bool is_initialized_sharded = false;  ///< the model is made under zero::Init
  bool recomputes_by_call = false;      ///< trireme::recompute() around the model
  bool evaluates_between = false;       ///< a forward without gradients after each step
  bool has_second_engine = false;       ///< another model trains in between, sharded and recomputed
  bool is_in_stages = false;            ///< one pipeline stage on each rank, with the micro-batches of both
  Scope scope = Scope::kNone;
  Checkpoint checkpoint = Checkpoint::kNone;

  Scenario();
};

/// The same on every rank.
struct Outcome {
  std::vector<double> losses;                    ///< of each step, the mean over its micro-batches
  std::map<std::string, at::Tensor> parameters;  ///< on the host
};

using namespace testing;

inline constexpr int kRanks = 2, kSteps = 4, kAccumulation = 2;
inline constexpr int kSaveAfter = 2;  // steps

inline std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<at::Tensor>& parts,
                                                      const std::vector<std::string>&) {
  return std::make_unique<torch::optim::AdamW>(parts, torch::optim::AdamWOptions(2e-3).weight_decay(0.05));
}

/// Units that are released as soon as they may be, and NaNs in released memory.
inline Config config_of(const Scenario& scenario, int ranks) {
  Json json = scenario.config;
  if (ranks == 1) json.erase("train_batch_size");
  if (scenario.is_in_stages && ranks > 1) {
    json["pipeline"] = {{"stages", ranks}};
    json["gradient_accumulation_steps"] = ranks * kAccumulation;
  }
  Config config = config_from_json(json, ranks, {}, "ds_config.json");
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
};

/// A model and its engine on one rank.
class Training {
 public:
  virtual ~Training() = default;
  virtual Engine& engine() = 0;
  /// This rank's part of the model.
  virtual const torch::nn::Module& module() const = 0;
  /// One window. Returns the mean loss of all ranks' micro-batches.
  virtual double step(int number) = 0;
  virtual void load_checkpoint(const std::filesystem::path& folder, const std::string& tag) = 0;
};

inline std::unique_ptr<Group> device_group(const Scenario& scenario, Group& world, int device) {
  return scenario.is_on_device ? make_fake_nccl_group(world, fake_device(device)) : nullptr;
}

inline TrainedModel model_of(const Scenario& scenario, Group& world, int device) {
  TrainedModel model;
  {
    std::optional<zero::Init> init;
    if (scenario.is_initialized_sharded) init.emplace(world, zero::InitPolicy{.smallest_bytes = 0, .live_bytes = 0});
    model = make_llama();
  }
  if (scenario.is_initialized_sharded && scenario.is_on_device)  // as programs do that bring a model to a GPU
    for (const at::Tensor& parameter : model.module->parameters()) zero::make_whole(parameter);
  if (scenario.is_on_device) move_to_fake(*model.module, fake_device(device));
  return model;
}

inline InitializeOptions options_of(const Scenario& scenario, const Group& world) {
  InitializeOptions options{.config = config_of(scenario, world.size()), .parameter_groups = scenario.parameter_groups};
  if (scenario.has_client_optimizer) options.client_optimizer = adamw;
  return options;
}

class WholeTraining final : public Training {
 public:
  WholeTraining(const Scenario& scenario, Group& world, int device)
      : scenario_(scenario),
        group_(device_group(scenario, world, device)),
        model_(model_of(scenario, world, device)),
        engine_(group_ ? *group_ : world, *model_.module, options_of(scenario, world)) {}

  Engine& engine() override { return engine_; }
  const torch::nn::Module& module() const override { return *model_.module; }
  void load_checkpoint(const std::filesystem::path& folder, const std::string& tag) override {
    engine_.load_checkpoint(folder, {.tag = tag});
  }

  double step(int number) override {
    double sum = 0;
    for (int i = 0; i < kAccumulation; ++i) {
      const int64_t round = number * kAccumulation + i;
      sum += backward({round * kRanks + engine_.group().rank(), round}, i + 1 < kAccumulation);
      engine_.step();
    }
    if (scenario_.evaluates_between) {
      const torch::NoGradGuard no_grad;
      (void)forward({1000, 0});
    }
    const at::Tensor total = at::tensor({sum}, at::kDouble);
    engine_.group().all_reduce(total).wait();
    return total.item<double>() / (kAccumulation * engine_.group().size());
  }

 private:
  at::Tensor forward(const testing::MicroBatch& batch) {
    ForwardScope scope = engine_.begin_forward();
    if (!scenario_.recomputes_by_call) return model_.loss(batch);
    return recompute([loss = model_.loss, batch](const at::Tensor&) { return loss(batch); }, at::empty({0}));
  }

  double backward(const testing::MicroBatch& batch, bool more_follows) {
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
  const std::unique_ptr<Group> group_;
  const TrainedModel model_;
  OpenEngine engine_;
};

/// The layers of the same model, with its weights.
inline std::vector<LayerSpec> layers_of(const Scenario& scenario, const torch::nn::Module& model, int device) {
  std::vector<LayerSpec> specs;
  const auto weights = std::make_shared<std::map<std::string, at::Tensor>>(parameters_of(model));
  for (const ModelLayer& layer : llama_layers(small_llama())) {
    LayerSpec& spec = specs.emplace_back();
    spec.type = layer.type;
    spec.name = layer.name;
    spec.make = [=, is_on_device = scenario.is_on_device] {
      const torch::NoGradGuard no_grad;
      auto module = layer.make();
      for (auto& item : module->named_parameters()) item.value().copy_(weights->at(layer.name + "." + item.key()));
      if (is_on_device) move_to_fake(*module, fake_device(device));
      return module;
    };
    spec.forward = [forward = layer.forward, recomputes = scenario.recomputes_by_call](torch::nn::Module* module,
                                                                                       const c10::IValue& value) {
      const auto call = [=](const at::Tensor& x) { return forward(*module, x); };
      return c10::IValue(recomputes ? recompute(call, value.toTensor()) : call(value.toTensor()));
    };
  }
  return specs;
}

inline PipelineModule stages_of(const Scenario& scenario, Group& world, int device) {
  PipelineModuleOptions cut;
  cut.stages = world.size();
  if (scenario.is_initialized_sharded) cut.sharded_init = {.smallest_bytes = 0, .live_bytes = 0};
  cut.loss = [](const c10::IValue& logits, const c10::IValue& targets) {
    return at::cross_entropy_loss(logits.toTensor().flatten(0, 1).to(at::kFloat), targets.toTensor().flatten());
  };
  return PipelineModule(layers_of(scenario, *make_llama().module, device), cut);
}

class StagedTraining final : public Training {
 public:
  StagedTraining(const Scenario& scenario, Group& world, int device)
      : scenario_(scenario),
        device_(device),
        group_(device_group(scenario, world, device)),
        engine_(group_ ? *group_ : world, stages_of(scenario, world, device), options_of(scenario, world)) {}

  Engine& engine() override { return engine_; }
  const torch::nn::Module& module() const override { return engine_.module(); }
  void load_checkpoint(const std::filesystem::path& folder, const std::string& tag) override {
    engine_.load_checkpoint(folder, {.tag = tag});
  }

  double step(int number) override {
    int64_t next = number * kAccumulation * kRanks;
    const MicroBatches batches = [&] { return std::optional(batch_of(next++)); };
    const double loss = train(batches);
    if (scenario_.evaluates_between) (void)engine_.eval_batch([&] { return std::optional(batch_of(1000)); });
    return loss;
  }

 private:
  trireme::MicroBatch batch_of(int64_t number) const {
    at::Tensor tokens = tokens_of({number, number / kRanks}, 13, {2, 9});
    if (scenario_.is_on_device) tokens = tokens.to(fake_device(device_));
    return {tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8)};
  }

  double train(const MicroBatches& batches) {
    if (scenario_.scope == Scope::kNoSync) {
      const NoSync scope = engine_.no_sync();
      return engine_.train_batch(batches).item<double>();
    }
    if (scenario_.scope == Scope::kCoalesce) {
      const CoalescedReduction scope = engine_.coalesce_grad_reduction();
      return engine_.train_batch(batches).item<double>();
    }
    return engine_.train_batch(batches).item<double>();
  }

  const Scenario& scenario_;
  const int device_;
  const std::unique_ptr<Group> group_;
  PipelineEngine engine_;
};

inline std::unique_ptr<Training> make_training(const Scenario& scenario, Group& world, int device) {
  if (scenario.is_in_stages && world.size() > 1) return std::make_unique<StagedTraining>(scenario, world, device);
  return std::make_unique<WholeTraining>(scenario, world, device);
}

/// Trains beside the other engine of its rank and asks for everything that could get in its way.
class SecondTraining {
 public:
  explicit SecondTraining(Group& world) : model_(make_mlp()) {
    Config config = default_config(world.size());
    config.optimizer = OptimizerOptions{.lr = 1e-2};
    config.pager = harsh_policy({"", 3, GatherPolicy::kCopy});
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

/// Loads what two ranks have saved on one rank and at another stage, and saves it again.
inline void save_again_on_one_rank(const Scenario& scenario, const std::filesystem::path& folder) {
  Scenario other = scenario;
  other.backend = RankBackend::kThreads;
  other.is_on_device = false;
  other.is_initialized_sharded = false;
  other.config["zero_optimization"] = {{"stage", 1}};
  other.config.erase("trireme");
  run_ranks(1, [&](Rank& rank) {
    const auto training = make_training(other, rank.world(), 0);
    training->load_checkpoint(folder, "first");
    training->engine().save_checkpoint(folder, {.tag = "second"});
    training->engine().destroy();
  });
}

/// Steps [begin, end) on all ranks, by a training that `prepare` and `finish` see before and after.
using Look = std::function<void(Training&, int rank)>;
inline void train_part(const Scenario& scenario, int begin, int end, const Look& prepare, const Look& finish,
                       Outcome& outcome) {
  FakeRecord record;
  std::mutex mutex;
  run_ranks(kRanks,
            [&](Rank& rank) {
              at::set_num_threads(1);
              std::optional<SecondTraining> second;
              const auto training = make_training(scenario, rank.world(), rank.id());
              if (scenario.has_second_engine) second.emplace(rank.world());
              prepare(*training, rank.id());
              for (int number = begin; number < end; ++number) {
                if (second) second->step(number);
                const double loss = training->step(number);
                if (rank.id() == 0) outcome.losses.push_back(loss);
              }
              finish(*training, rank.id());
              training->engine().destroy();
              const std::lock_guard lock(mutex);
              if (rank.id() == 0 || scenario.is_in_stages)
                for (const auto& [name, tensor] : parameters_of(training->module()))
                  outcome.parameters[name] = tensor.cpu();
            },
            {.backend = scenario.backend, .timeout = std::chrono::seconds(20)});
  if (const auto races = record.races(); !races.empty()) throw Error(ErrorCode::kInternal, "not ordered: " + races[0]);
}

inline Scenario::Scenario()
    : config{{"train_micro_batch_size_per_gpu", 1},
             {"gradient_accumulation_steps", kAccumulation},
             {"gradient_clipping", 0.5},
             {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 2e-3}, {"weight_decay", 0.05}}}}}} {}

/// Trains a small Llama for four steps of two micro-batches.
/// Throws    what the engine or the configuration's reader refuses, as a user sees it; Error: accesses that no stream or
///           event orders (on the device's stand-in).
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
