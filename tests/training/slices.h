// Trainings whose layers are cut over ranks, with a loss that gives each parameter any gradient.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/parity/cases.h"
#include "trireme/training/training.h"

namespace trireme::slices {

using namespace testing;

using Tensors = std::map<std::string, at::Tensor>;
using Shapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

inline constexpr int kSteps = 3;
inline constexpr int64_t kHeads = 4, kKeyValueHeads = 2;

/// The shapes of a Llama; over four ranks, vocabulary and MLP are cut unevenly, and each key and value head has two
/// ranks. Every rank has all `scales`, and data-parallel ranks share these otherwise on one tensor-parallel rank than
/// on another.
inline Shapes llama_shapes() {
  Shapes shapes = {{"model.embed_tokens.weight", {10, 8}}};
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    const Shapes more = {{layer + "self_attn.q_proj.weight", {8, 8}}, {layer + "self_attn.q_proj.bias", {8}},
                         {layer + "self_attn.k_proj.weight", {4, 8}}, {layer + "self_attn.v_proj.weight", {4, 8}},
                         {layer + "self_attn.o_proj.weight", {8, 8}}, {layer + "mlp.gate_proj.weight", {50, 8}},
                         {layer + "mlp.up_proj.weight", {50, 8}},     {layer + "mlp.down_proj.weight", {8, 50}},
                         {layer + "input_layernorm.weight", {8}},     {layer + "post_attention_layernorm.weight", {8}},
                         {layer + "mixer.scales", {100, 8}}};
    shapes.insert(shapes.end(), more.begin(), more.end());
  }
  shapes.push_back({"model.norm.weight", {8}});
  return shapes;
}

inline PartitionModel llama_facts() {
  return {.model_type = "llama", .heads = kHeads, .key_value_heads = kKeyValueHeads};
}

/// The shapes of a Bloom with two key/value heads: query heads, key and value of each stand together in one matrix.
/// Over four ranks, two have each key and value, and queries of their own; data-parallel ranks share the second one's
/// queries.
inline Shapes packed_shapes() {
  Shapes shapes = {{"transformer.word_embeddings.weight", {10, 8}}};
  for (const std::string layer : {"transformer.h.0.", "transformer.h.1."}) {
    const Shapes more = {{layer + "self_attention.query_key_value.weight", {40, 48}},
                         {layer + "self_attention.query_key_value.bias", {40}},
                         {layer + "self_attention.dense.weight", {8, 32}},
                         {layer + "input_layernorm.weight", {8}}};
    shapes.insert(shapes.end(), more.begin(), more.end());
  }
  return shapes;
}

inline PartitionModel packed_facts() { return {.model_type = "bloom", .heads = 16, .key_value_heads = kKeyValueHeads}; }

/// Parameters of any names, without operators.
class Part : public torch::nn::Module {
 public:
  void add(const std::string& path, const at::Tensor& value) {
    const size_t dot = path.find('.');
    if (dot == std::string::npos) {
      register_parameter(path, value.clone());
      return;
    }
    inside(path.substr(0, dot)).add(path.substr(dot + 1), value);
  }
  void tie(const std::string& name, const at::Tensor& parameter) {
    inside(name.substr(0, name.find('.'))).register_parameter(name.substr(name.find('.') + 1), parameter);
  }

 private:
  Part& inside(const std::string& name) {
    if (!parts_.contains(name)) parts_[name] = register_module(name, std::make_shared<Part>());
    return *parts_[name];
  }
  std::map<std::string, std::shared_ptr<Part>> parts_;
};

inline std::shared_ptr<Part> make_part(const Shapes& shapes, uint64_t seed) {
  auto part = std::make_shared<Part>();
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const auto& [name, shape] : shapes) part->add(name, at::randn(shape, generator));
  part->register_buffer("table", at::full({3}, static_cast<double>(seed)));
  return part;
}

/// The tied Llama, with a frozen norm.
inline std::shared_ptr<Part> make_llama_part(uint64_t seed) {
  auto part = make_part(llama_shapes(), seed);
  part->tie("lm_head.weight", part->named_parameters()["model.embed_tokens.weight"]);
  part->named_parameters()["model.norm.weight"].requires_grad_(false);
  return part;
}

/// A part whose last packed bias is frozen.
inline std::shared_ptr<Part> make_packed_part(uint64_t seed) {
  auto part = make_part(packed_shapes(), seed);
  part->named_parameters()["transformer.h.1.self_attention.query_key_value.bias"].requires_grad_(false);
  return part;
}

/// The gradient of a data-parallel rank's micro-batch, whole, by name.
inline at::Tensor gradient_of(const std::string& name, const std::vector<int64_t>& shape, int64_t sample) {
  return at::randn(shape, at::detail::createCPUGenerator(1000 * sample + std::hash<std::string>()(name) % 1000));
}

/// The elements of `whole` that a rank has.
inline at::Tensor cut(const at::Tensor& whole, const TensorPart& part) {
  if (part.dim < 0) return whole;
  std::vector<at::Tensor> pieces;
  for (const Interval& own : part.intervals) pieces.push_back(whole.slice(part.dim, own.begin, own.end));
  return at::cat(pieces, part.dim);
}

struct TrainingRun {
  int tensor = 1;
  int data = 1;
  ZeroStage stage = kZeroStages.front();
  double clipping = 0;
  at::ScalarType dtype = at::kFloat;
  int accumulation = 1;
  bool is_deterministic = false;
  bool is_on_device = false;
  double offload_ratio = 0;
  bool is_under_init = false;
  bool is_packed = false;  ///< make_packed_part() instead of make_llama_part()
  OptimizerOptions optimizer = {.lr = 1e-2};

  int world() const { return tensor * data; }
};

inline TrainingOptions options_of(const TrainingRun& run) {
  const Degrees degrees{.tensor = run.tensor};
  Config config = default_config(run.world(), degrees);
  config.pager = run.stage.policy;
  config.pager.deterministic = run.is_deterministic;
  config.pager.offload_ratio = run.offload_ratio;
  config.gradient_clipping = run.clipping;
  config.batch.gradient_accumulation_steps = run.accumulation;
  config.batch.train_batch_size = int64_t{run.data} * run.accumulation;
  config.precision.weight_dtype = run.dtype;
  if (run.dtype == at::kHalf) config.precision.loss_scale.loss_scale = 64;
  config.optimizer = run.optimizer;
  return {.config = config, .partition_model = run.is_packed ? packed_facts() : llama_facts()};
}

/// A backward pass whose gradients are the mean of `samples`', in slices.
inline void backward(Training& training, const std::vector<int64_t>& samples) {
  at::Tensor loss;
  const std::vector<ParameterSpec>& specs = training.pager().parameters();
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].trainable) continue;
    const TensorPart part = specs[i].model_part();
    at::Tensor gradient;
    for (const int64_t sample : samples) {
      const at::Tensor one = gradient_of(specs[i].name, part.shape, sample) / static_cast<double>(samples.size());
      gradient = gradient.defined() ? gradient + one : one;
    }
    const at::Tensor parameter = training.pager().whole(static_cast<int>(i));
    const at::Tensor term = (parameter.to(at::kFloat) * gradient.to(parameter.device())).sum();
    loss = loss.defined() ? loss + term : term;
  }
  loss = training.step().scale(loss);
  training.step().backward_from({torch::autograd::impl::gradient_edge(loss)}, {at::ones_like(loss)}, {});
}

inline Tensors weights_of(Training& training) {
  Tensors weights;
  for (size_t i = 0; i < training.pager().parameters().size(); ++i)
    weights[training.pager().parameters()[i].name] = training.pager().whole(static_cast<int>(i)).detach().cpu().clone();
  return weights;
}

}  // namespace trireme::slices
