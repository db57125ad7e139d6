// Pipelines whose stages have parts of each sample, and one process without an engine, which they must train as.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/run_ranks.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/models/gpt.h"
#include "trireme/models/llama.h"
#include "trireme/pipeline/pipeline_engine.h"

namespace trireme::pipeline_sequence {

// B batch, S sequence, H hidden, N heads, D head size, V vocabulary.
inline constexpr int64_t kVocabulary = 19, kHidden = 12, kHeads = 2, kLength = 11;
inline constexpr double kLr = 0.01, kBeta2 = 0.99, kEps = 1e-3;  // steps are near to multiples of gradients

struct Recipe {
  int data = 1, stages = 2, sequence = 2;
  int micro_batches = 4, steps = 2;
  std::string schedule = "1f1b";
  SequenceAttention attention = SequenceAttention::kUlysses;
  std::vector<LayerSpec> layers = {};
  std::function<MicroBatch(int64_t number)> batch = {};
  std::function<void(Config&)> configure = {};
  std::function<void(PipelineModuleOptions&)> change_options = {};
  int ranks() const { return data * stages * sequence; }
};

struct Step {
  double loss = 0, norm = 0;
  std::map<std::string, at::Tensor> gradients;  ///< before clipping, by parameter
};
struct Outcome {
  std::vector<Step> steps;
  std::map<std::string, at::Tensor> weights;
};

/// The layer with weights from a generator of its own, named by `name`.
template <class Impl, class... Arguments>
LayerSpec drawn(const std::string& name, const LayerSpec& like, uint64_t seed, Arguments... arguments) {
  LayerSpec spec = like;
  spec.name = name;
  spec.make = [seed, arguments...] {
    const auto module = std::make_shared<Impl>(arguments...);
    const torch::NoGradGuard no_grad;
    at::Generator generator = at::detail::createCPUGenerator(seed);
    for (at::Tensor& parameter : module->parameters()) parameter.copy_(at::randn(parameter.sizes(), generator) * 0.3);
    return module;
  };
  return spec;
}

inline at::Tensor at_place(const c10::IValue& value, size_t i) { return value.toTupleRef().elements()[i].toTensor(); }

/// Attention with a mask of keys, or a causal one, and positions that are looked up anew in each layer.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    qkv = register_module("qkv", torch::nn::Linear(kHidden, 3 * kHidden));
    o = register_module("o", torch::nn::Linear(kHidden, kHidden));
    places = register_module("places", torch::nn::Embedding(kLength, kHidden));
  }
  at::Tensor forward(at::Tensor x_BSH, const at::Tensor& positions_BS, const at::Tensor& mask_BS) {
    x_BSH = x_BSH + places->forward(positions_BS);
    const auto heads = qkv->forward(x_BSH).unflatten(-1, {3 * kHeads, kHidden / kHeads}).transpose(1, 2).chunk(3, 1);
    const bool is_causal = !mask_BS.defined();
    const std::optional<at::Tensor> mask = is_causal ? std::nullopt : std::optional(mask_BS.unsqueeze(1).unsqueeze(1));
    const at::Tensor y_BNSD = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, 0.0, is_causal);
    return x_BSH + o->forward(y_BNSD.transpose(1, 2).flatten(2)).tanh();
  }
  torch::nn::Linear qkv{nullptr}, o{nullptr};
  torch::nn::Embedding places{nullptr};
};

/// Layers that hand on (ids, positions, mask): every other block looks at the padding, the others at the past.
inline std::vector<LayerSpec> hand_written(int blocks = 4, bool is_tied = false) {
  std::vector<LayerSpec> layers;
  LayerSpec embedding;
  embedding.type = "Embedding";
  embedding.forward = [](torch::nn::Module* module, const c10::IValue& value) {
    const at::Tensor x = static_cast<torch::nn::EmbeddingImpl*>(module)->forward(at_place(value, 0));
    return c10::IValue(std::make_tuple(x, at_place(value, 1), at_place(value, 2)));
  };
  embedding = drawn<torch::nn::EmbeddingImpl>("embed", embedding, 1, kVocabulary, kHidden);
  layers.push_back(is_tied ? trireme::tied("embedding", embedding) : embedding);
  for (int i = 0; i < blocks; ++i) {
    LayerSpec block;
    block.type = "Block";
    block.forward = [is_causal = i % 2 == 0](torch::nn::Module* module, const c10::IValue& value) {
      const at::Tensor positions = at_place(value, 1), mask = at_place(value, 2);
      const at::Tensor x =
          static_cast<BlockImpl*>(module)->forward(at_place(value, 0), positions, is_causal ? at::Tensor() : mask);
      return c10::IValue(std::make_tuple(x, positions, mask));
    };
    layers.push_back(drawn<BlockImpl>(str("block", i), block, static_cast<uint64_t>(10 + i)));
  }
  LayerSpec head = embedding;
  head.type = "Linear";
  head.name = "head";
  head.forward = [is_tied](torch::nn::Module* module, const c10::IValue& value) {
    const at::Tensor& weight = is_tied ? static_cast<torch::nn::EmbeddingImpl*>(module)->weight
                                       : static_cast<torch::nn::LinearImpl*>(module)->weight;
    return c10::IValue(at::linear(at_place(value, 0), weight));
  };
  if (is_tied)
    layers.push_back(trireme::tied("embedding", head));
  else
    layers.push_back(
        drawn<torch::nn::LinearImpl>("head", head, 2, torch::nn::LinearOptions(kHidden, kVocabulary).bias(false)));
  return layers;
}

/// The layers of a built-in model, of (tokens, positions).
inline std::vector<LayerSpec> built_in(const std::vector<ModelLayer>& model) {
  std::vector<LayerSpec> layers;
  uint64_t seed = 100;
  for (const ModelLayer& layer : model) {
    LayerSpec& spec = layers.emplace_back();
    spec.type = layer.type;
    spec.name = layer.name;
    spec.tie = layer.is_tied ? "embedding" : "";
    const uint64_t own_seed = layer.is_tied ? 99 : ++seed;
    spec.make = [make = layer.make, own_seed] {
      const auto module = make();
      const torch::NoGradGuard no_grad;
      at::Generator generator = at::detail::createCPUGenerator(own_seed);
      for (at::Tensor& parameter : module->parameters()) parameter.copy_(at::randn(parameter.sizes(), generator) * 0.3);
      return module;
    };
    spec.forward = [layer](torch::nn::Module* module, const c10::IValue& value) {
      return run_layer(layer, *module, value);
    };
  }
  return layers;
}

inline at::Tensor tokens_of(int64_t number) {
  const auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(1000 + number));
  return at::randint(kVocabulary, {2, kLength + 1}, generator, at::kLong);
}

/// The labels of a micro-batch are ignored at more of its first tokens than of its last ones.
inline at::Tensor labels_of(int64_t number) {
  at::Tensor labels = tokens_of(number).narrow(1, 1, kLength).clone();
  labels.narrow(1, 0, number % 3 * 2).fill_(-100);
  return labels;
}

inline at::Tensor positions() { return at::arange(kLength, at::kLong).unsqueeze(0); }

/// (ids, positions, mask): the last tokens of the second sample are padding.
inline MicroBatch masked_batch(int64_t number) {
  at::Tensor mask = at::ones({2, kLength}, at::kBool);
  mask[1].narrow(0, kLength - 3, 3).fill_(false);
  return {std::make_tuple(tokens_of(number).narrow(1, 0, kLength), positions(), mask), labels_of(number)};
}

/// (tokens, positions).
inline MicroBatch positioned_batch(int64_t number) {
  return {std::make_tuple(tokens_of(number).narrow(1, 0, kLength), positions()), labels_of(number)};
}

inline at::Tensor loss_of(const c10::IValue& logits, const c10::IValue& labels) {
  return at::cross_entropy_loss(logits.toTensor().flatten(0, 1), labels.toTensor().flatten());
}

inline void forget_clipping(Step& step, double max_norm) {
  const double factor = std::max(1.0, (step.norm + 1e-6) / max_norm);
  for (auto& [name, gradient] : step.gradients) gradient = gradient * factor;
}

inline constexpr double kMaxNorm = 0.5;

/// By libtorch alone: the micro-batches of all data-parallel ranks one after the other.
inline Outcome train_plain(const Recipe& recipe) {
  at::set_num_threads(1);
  Outcome outcome;
  std::map<std::string, std::shared_ptr<torch::nn::Module>> tied;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::map<std::string, at::Tensor> parameters;
  for (const LayerSpec& layer : recipe.layers) {
    auto& known = tied[layer.tie];
    const bool is_shared = !layer.tie.empty() && known;
    modules.push_back(is_shared ? known : layer.make());
    if (!layer.tie.empty()) known = modules.back();
    if (!is_shared)
      for (const auto& item : modules.back()->named_parameters())
        parameters[layer.name + "." + item.key()] = item.value();
  }
  std::vector<at::Tensor> all;
  for (const auto& [name, parameter] : parameters) all.push_back(parameter);
  torch::optim::AdamW optimizer(all, torch::optim::AdamWOptions(kLr).betas({0.0, kBeta2}).eps(kEps).weight_decay(0.01));
  const int count = recipe.micro_batches * recipe.data;
  for (int number = 0; number < recipe.steps; ++number) {
    Step& step = outcome.steps.emplace_back();
    optimizer.zero_grad();
    for (int i = 0; i < count; ++i) {
      const MicroBatch batch = recipe.batch(number * count + i);
      c10::IValue value = batch.inputs;
      for (size_t layer = 0; layer < modules.size(); ++layer)
        value = recipe.layers[layer].forward(modules[layer].get(), value);
      const at::Tensor loss = loss_of(value, batch.labels);
      (loss / count).backward();
      step.loss += loss.item<double>() / count;
    }
    double squares = 0;
    for (const auto& [name, parameter] : parameters) {
      step.gradients[name] = parameter.grad().clone();
      squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
    }
    step.norm = std::sqrt(squares);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : all)
      if (step.norm > kMaxNorm) parameter.mutable_grad().mul_(kMaxNorm / (step.norm + 1e-6));
    optimizer.step();
  }
  for (const auto& [name, parameter] : parameters) outcome.weights[name] = parameter.detach().clone();
  return outcome;
}

inline PipelineModule module_of(const Recipe& recipe) {
  PipelineModuleOptions options;
  options.stages = recipe.stages;
  options.partition_method = "uniform";
  options.schedule = recipe.schedule;
  const bool has_chunks =
      recipe.schedule == "interleaved" || recipe.schedule == "zb-v" || recipe.schedule == "dualpipe-v";
  options.chunks = has_chunks ? 2 : 1;
  options.loss = loss_of;
  if (recipe.change_options) recipe.change_options(options);
  return {recipe.layers, options};
}

inline Config config_of(const Recipe& recipe) {
  Config config = default_config(recipe.ranks(), {.pipe = recipe.stages, .sequence = recipe.sequence});
  config.optimizer = {
      .kind = OptimizerKind::kAdamW, .lr = kLr, .beta1 = 0, .beta2 = kBeta2, .eps = kEps, .weight_decay = 0.01};
  config.batch = {.train_batch_size = 2 * recipe.micro_batches * recipe.data,
                  .train_micro_batch_size_per_gpu = 2,
                  .gradient_accumulation_steps = recipe.micro_batches};
  config.gradient_clipping = kMaxNorm;
  config.sequence_attention = recipe.attention;
  config.pager.units.merge_below_bytes = 0;
  config.pager.poison = true;
  if (recipe.configure) recipe.configure(config);
  return config;
}

/// The micro-batches of a data-parallel rank.
inline MicroBatches batches_of(const Recipe& recipe, DataPlace place) {
  return [=, number = int64_t{0}]() mutable { return std::optional(recipe.batch(number++ * place.size + place.rank)); };
}

inline Outcome train_in_stages(const Recipe& recipe) {
  Outcome outcome;
  std::mutex mutex;
  outcome.steps.resize(static_cast<size_t>(recipe.steps));
  run_ranks(recipe.ranks(), [&](Rank& rank) {
    at::set_num_threads(1);
    PipelineModule module = module_of(recipe);
    auto engine = trireme::initialize(rank.world(), module, {.config = config_of(recipe)});
    const MicroBatches batches = batches_of(recipe, engine.data_place());
    for (Step& step : outcome.steps) {
      const double loss = engine.train_batch(batches).item<double>();
      const double norm = engine.get_global_grad_norm().value();
      std::map<std::string, at::Tensor> gradients;
      for (const auto& item : engine.module().named_parameters())
        if (find_managed(item.value()))
          gradients[item.key()] = safe_get_full_optimizer_state(item.value(), "exp_avg")->clone();
      const std::lock_guard lock(mutex);
      step.loss = loss;
      step.norm = norm;
      step.gradients.merge(gradients);
    }
    std::map<std::string, at::Tensor> weights;
    for (const auto& item : engine.module().named_parameters())
      if (find_managed(item.value())) weights[item.key()] = safe_get_full_fp32_param(item.value())->clone();
    engine.destroy();
    const std::lock_guard lock(mutex);
    outcome.weights.merge(weights);
  });
  for (Step& step : outcome.steps) forget_clipping(step, kMaxNorm);
  return outcome;
}

/// Losses, norms, gradients and weights relative to themselves.
inline void expect_near(const Outcome& got, const Outcome& expected, double tolerance = 1e-6) {
  const auto expect_tensors = [&](const auto& some, const auto& others, const std::string& what) {
    ASSERT_EQ(some.size(), others.size()) << what;
    for (const auto& [name, tensor] : others) {
      ASSERT_TRUE(some.contains(name)) << what << " of " << name;
      EXPECT_GT(tensor.norm().template item<double>(), 0) << what << " of " << name;
      EXPECT_LE((some.at(name) - tensor).norm().template item<double>(),
                tolerance * tensor.norm().template item<double>())
          << what << " of " << name;
    }
  };
  ASSERT_EQ(got.steps.size(), expected.steps.size());
  for (size_t i = 0; i < got.steps.size(); ++i) {
    EXPECT_NEAR(got.steps[i].loss, expected.steps[i].loss, tolerance * expected.steps[i].loss) << "step " << i;
    EXPECT_NEAR(got.steps[i].norm, expected.steps[i].norm, tolerance * expected.steps[i].norm) << "step " << i;
    expect_tensors(got.steps[i].gradients, expected.steps[i].gradients, str("step ", i, ", gradient"));
  }
  expect_tensors(got.weights, expected.weights, "weights");
}

inline void expect_parity(const Recipe& recipe) { expect_near(train_in_stages(recipe), train_plain(recipe)); }

inline Recipe recipe_of_blocks(bool is_tied = false) {
  return {.layers = hand_written(4, is_tied), .batch = masked_batch};
}

}  // namespace trireme::pipeline_sequence
