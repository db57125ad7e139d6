// A model of eight layers, trained whole by an Engine and in stages by a PipelineEngine.
#pragma once

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "trireme/access/parameter_access.h"
#include "trireme/engine/model_engine.h"
#include "trireme/pipeline/pipeline_engine.h"

namespace trireme::pipeline_testing {

constexpr int64_t kVocabulary = 13, kHidden = 8, kLength = 3;

/// A module of class Impl whose parameters are drawn from a generator of the layer's own.
template <class Impl, class... Arguments>
std::shared_ptr<Impl> make_drawn(int layer, Arguments... arguments) {
  const auto module = std::make_shared<Impl>(arguments...);
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(100 + static_cast<uint64_t>(layer));
  for (at::Tensor& parameter : module->parameters()) parameter.copy_(at::randn(parameter.sizes(), generator) * 0.4);
  return module;
}

template <class Impl, class... Arguments>
LayerSpec drawn(int layer, Arguments... arguments) {
  LayerSpec spec = trireme::layer<Impl>(arguments...);
  spec.make = [layer, arguments...] { return make_drawn<Impl>(layer, arguments...); };
  return spec;
}

struct Recipe {
  int data = 1;  ///< data-parallel ranks
  int stages = 2;
  int tensor = 1;  ///< ranks that have slices of a stage's layers
  int micro_batches = 4;
  std::string schedule = "1f1b";
  bool tied = false;  ///< the last layer multiplies with the embedding's weight
  int steps = 10;
  int recomputed_layers = 0;
  bool sharded_init = false;
  bool takes_sizes_from_inputs = false;
  bool keeps_gradients = false;  ///< of every step: AdamW's first moment is the gradient then
  std::function<void(Config&)> configure = {};
  std::function<std::vector<LayerSpec>(std::vector<LayerSpec>)> change_layers = {};
  std::function<void(PipelineModuleOptions&)> change_options = {};
  std::function<MicroBatches(int data_rank)> batches = {};  ///< in place of batches_of()
};

inline int chunks_of(const std::string& schedule) {
  return schedule == "interleaved" || schedule == "zb-v" || schedule == "dualpipe-v" ? 2 : 1;
}

inline Config config_of(const Recipe& recipe, int world) {
  Config config = default_config(world, {.pipe = world / recipe.data / recipe.tensor, .tensor = recipe.tensor});
  config.optimizer = {.kind = OptimizerKind::kAdamW, .lr = 0.02, .weight_decay = 0.01};
  if (recipe.keeps_gradients) config.optimizer->beta1 = 0;
  config.batch = {.train_batch_size = 2 * recipe.micro_batches * recipe.data,
                  .train_micro_batch_size_per_gpu = 2,
                  .gradient_accumulation_steps = recipe.micro_batches};
  config.pager.units.merge_below_bytes = 0;
  config.gradient_clipping = 0.5;
  config.pipeline.whole_gradients = false;  // sums in the order of a model without stages, at every ZeRO stage
  if (recipe.configure) recipe.configure(config);
  return config;
}

/// Embedding, six linear layers with tanh, and the head.
inline std::vector<LayerSpec> layers_of(const Recipe& recipe) {
  std::vector<LayerSpec> layers;
  LayerSpec embedding = drawn<torch::nn::EmbeddingImpl>(0, kVocabulary, kHidden);
  layers.push_back(recipe.tied ? trireme::tied("embedding", embedding) : embedding);
  for (int i = 1; i <= 6; ++i) {
    LayerSpec linear = drawn<torch::nn::LinearImpl>(i, kHidden, kHidden);
    linear.forward = [](torch::nn::Module* module, const c10::IValue& value) {
      const at::Tensor x = value.toTensor();
      return c10::IValue(x + static_cast<torch::nn::LinearImpl*>(module)->forward(x).tanh());
    };
    layers.push_back(linear);
  }
  if (recipe.tied) {
    LayerSpec head = embedding;
    head.forward = [](torch::nn::Module* module, const c10::IValue& value) {
      return c10::IValue(at::linear(value.toTensor(), static_cast<torch::nn::EmbeddingImpl*>(module)->weight));
    };
    layers.push_back(trireme::tied("embedding", head));
  } else {
    layers.push_back(drawn<torch::nn::LinearImpl>(7, kHidden, kVocabulary));
  }
  return recipe.change_layers ? recipe.change_layers(std::move(layers)) : layers;
}

inline at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& labels) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), labels.flatten());
}

/// Tokens of micro-batch `number` of data-parallel rank `rank`.
inline at::Tensor tokens_of(int rank, int64_t number) {
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 + 100 * number + rank));
  return at::randint(kVocabulary, {2, kLength + 1}, generator, at::kLong);
}

struct Outcome {
  std::vector<float> losses;
  std::map<std::string, at::Tensor> weights;
  std::map<std::string, at::Tensor> gradients;  ///< clipped, by parameter and step; where they are kept
  PipelineCounters counters;
  int cut_parameters = 0;  ///< of which a rank has a slice
};

/// The weights of this rank's engine, whole (slices where layers are cut). Collective over its data-parallel ranks.
inline std::map<std::string, at::Tensor> weights_of(EngineBase& engine) {
  std::map<std::string, at::Tensor> weights;
  for (size_t i = 0; i < engine.pager().parameters().size(); ++i)
    weights[engine.pager().parameters()[i].name] = engine.pager().whole(static_cast<int>(i)).detach().clone();
  return weights;
}

/// The weights that `engine` gives back, whole, without copies. Collective over the ranks of its stage.
inline std::map<std::string, at::Tensor> weights_after(PipelineEngine& engine) {
  std::map<std::string, at::Tensor> weights = weights_of(engine);
  engine.destroy();
  for (const auto& item : engine.module().named_parameters())
    if (const auto found = weights.find(item.key()); found != weights.end()) found->second = item.value().detach();
  return weights;
}

/// Adds this rank's parameters' gradients of a step, whole. Collective over the ranks of its stage.
inline void keep_gradients(const torch::nn::Module& module, int step, std::map<std::string, at::Tensor>& gradients) {
  for (const auto& item : module.named_parameters())
    if (find_managed(item.value()))  // or it is a copy of another stage's
      gradients[str(item.key(), ", step ", step)] = safe_get_full_optimizer_state(item.value(), "exp_avg")->clone();
}

/// The same layers as one module.
struct Whole : torch::nn::Module {
  explicit Whole(const std::vector<LayerSpec>& specs) : layers(specs) {
    std::map<std::string, std::shared_ptr<torch::nn::Module>> tied;
    for (size_t i = 0; i < layers.size(); ++i) {
      auto& known = tied[layers[i].tie];
      const bool shares = !layers[i].tie.empty() && known;
      modules.push_back(shares ? known : layers[i].make ? layers[i].make() : nullptr);
      if (!layers[i].tie.empty()) known = modules.back();
      if (!shares && modules.back()) register_module(std::to_string(i), modules.back());
    }
  }
  at::Tensor forward(const at::Tensor& tokens) {
    c10::IValue value = tokens;
    for (size_t i = 0; i < layers.size(); ++i) value = layers[i].forward(modules[i].get(), value);
    return value.toTensor();
  }
  std::vector<LayerSpec> layers;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
};

inline Outcome train_whole(const Recipe& recipe) {
  Outcome outcome;
  run_ranks(recipe.data, [&](Rank& rank) {
    Whole module(layers_of(recipe));
    Recipe whole = recipe;
    whole.tensor = 1;
    auto engine = trireme::initialize(rank.world(), module, {.config = config_of(whole, rank.size())});
    for (int step = 0; step < recipe.steps; ++step) {
      at::Tensor sum = at::zeros({1});
      for (int i = 0; i < recipe.micro_batches; ++i) {
        const at::Tensor tokens = tokens_of(rank.id(), step * recipe.micro_batches + i);
        const at::Tensor loss = loss_of(engine.forward(tokens.narrow(1, 0, kLength)), tokens.narrow(1, 1, kLength));
        sum += loss.detach().to(at::kFloat);
        engine.backward(loss);
        engine.step();
      }
      sum = sum / recipe.micro_batches;
      rank.world().all_reduce(sum).wait();
      if (rank.id() == 0) outcome.losses.push_back((sum / recipe.data).item<float>());
      std::map<std::string, at::Tensor> gradients;
      if (recipe.keeps_gradients) keep_gradients(module, step, gradients);
      if (rank.id() == 0) outcome.gradients.merge(gradients);
    }
    auto weights = weights_of(engine);
    if (rank.id() == 0) outcome.weights = std::move(weights);
  });
  return outcome;
}

inline PipelineModule pipeline_of(const Recipe& recipe) {
  PipelineModuleOptions options;
  options.stages = recipe.stages;
  options.schedule = recipe.schedule;
  options.chunks = chunks_of(recipe.schedule);
  options.partition_method = "uniform";
  options.activation_checkpoint_interval = recipe.recomputed_layers;
  options.loss = [](const c10::IValue& outputs, const c10::IValue& labels) {
    return loss_of(outputs.toTensor(), labels.toTensor());
  };
  if (recipe.sharded_init) options.sharded_init = {.smallest_bytes = 0, .live_bytes = 0};
  if (recipe.change_options) recipe.change_options(options);
  return {layers_of(recipe), options};
}

/// The micro-batches of one data-parallel rank.
inline MicroBatches batches_of(int data_rank) {
  return [data_rank, number = int64_t{0}]() mutable {
    const at::Tensor tokens = tokens_of(data_rank, number++);
    return std::optional(MicroBatch{tokens.narrow(1, 0, kLength), tokens.narrow(1, 1, kLength)});
  };
}

inline Outcome train_in_stages(const Recipe& recipe) {
  Outcome outcome;
  std::mutex mutex;
  run_ranks(recipe.data * recipe.stages * recipe.tensor, [&](Rank& rank) {
    PipelineModule module = pipeline_of(recipe);
    auto engine = trireme::initialize(
        rank.world(), module,
        {.config = config_of(recipe, rank.size()), .takes_sizes_from_inputs = recipe.takes_sizes_from_inputs});
    const int data_rank = engine.group().rank();
    const MicroBatches batches = recipe.batches ? recipe.batches(data_rank) : batches_of(data_rank);
    std::vector<float> losses;
    std::map<std::string, at::Tensor> gradients;
    for (int step = 0; step < recipe.steps; ++step) {
      losses.push_back(engine.train_batch(batches).item<float>());
      if (recipe.keeps_gradients) keep_gradients(engine.module(), step, gradients);
    }
    const PipelineCounters counters = engine.runner().counters();
    const bool is_first = engine.group().rank() == 0;
    const auto cut = std::ranges::count_if(engine.pager().parameters(),
                                           [](const ParameterSpec& spec) { return spec.part.dim >= 0; });
    auto weights = recipe.tensor > 1 ? weights_after(engine) : weights_of(engine);
    const std::lock_guard lock(mutex);
    if (rank.id() == 0) outcome.losses = losses;
    if (rank.id() == 0) outcome.counters = counters;
    if (is_first) outcome.cut_parameters += static_cast<int>(cut);
    if (is_first) outcome.weights.merge(weights);
    if (is_first) outcome.gradients.merge(gradients);
  });
  return outcome;
}

}  // namespace trireme::pipeline_testing
