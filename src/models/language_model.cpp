#include "trireme/models/language_model.h"

#include <ATen/ops/cross_entropy_loss.h>

#include <algorithm>
#include <tuple>

#include "models/options_check.h"
#include "trireme/base/error.h"
#include "trireme/models/gpt.h"
#include "trireme/models/llama.h"

namespace trireme {
namespace {

// Counted apart from construction, so that a model that fits nowhere can be estimated.
int64_t layer_matrices(const LlamaOptions& o) {
  const int64_t q_size = o.num_attention_heads * head_dim(o);
  const int64_t kv_size = o.num_key_value_heads * head_dim(o);
  return 2 * o.hidden_size * (q_size + kv_size) + 3 * o.hidden_size * o.intermediate_size;
}

int64_t layer_matrices(const GptOptions& o) { return 4 * o.n_embd * o.n_embd + 2 * o.n_embd * inner_size(o); }

int64_t count(const LlamaOptions& o) {
  const int64_t norms = 2 * o.hidden_size;
  const int64_t embeddings = (o.tie_word_embeddings ? 1 : 2) * o.vocab_size * o.hidden_size;
  return embeddings + o.num_hidden_layers * (layer_matrices(o) + norms) + o.hidden_size;
}

int64_t count(const GptOptions& o) {
  const int64_t biases = 4 * o.n_embd + inner_size(o) + o.n_embd;
  const int64_t norms = 4 * o.n_embd;
  return (o.vocab_size + o.n_positions) * o.n_embd + o.n_layer * (layer_matrices(o) + biases + norms) + 2 * o.n_embd;
}

// Multiply-adds of a token's forward.
int64_t layer_products(const LlamaOptions& o, int64_t seq) {
  return layer_matrices(o) + 2 * o.num_attention_heads * head_dim(o) * seq;
}
int64_t layer_products(const GptOptions& o, int64_t seq) { return layer_matrices(o) + 2 * o.n_embd * seq; }
int64_t head_products(const LlamaOptions& o) { return o.vocab_size * o.hidden_size; }
int64_t head_products(const GptOptions& o) { return o.vocab_size * o.n_embd; }
int64_t layer_count(const LlamaOptions& o) { return o.num_hidden_layers; }
int64_t layer_count(const GptOptions& o) { return o.n_layer; }

template <class Options>
int64_t training_flops(const Options& o, int64_t seq) {
  return 6 * (layer_count(o) * layer_products(o, seq) + head_products(o));
}

std::shared_ptr<LanguageModel> make(const LlamaOptions& options) { return std::make_shared<LlamaImpl>(options); }
std::shared_ptr<LanguageModel> make(const GptOptions& options) { return std::make_shared<GptImpl>(options); }

std::vector<ModelLayer> layers_of(const LlamaOptions& options) { return llama_layers(options); }
std::vector<ModelLayer> layers_of(const GptOptions& options) { return gpt_layers(options); }

template <class Options>
std::vector<ModelLayer> layers_of(const Options& options, int64_t seq) {
  std::vector<ModelLayer> layers = layers_of(options);
  for (ModelLayer& layer : layers)
    if (layer.type.ends_with("Block")) layer.multiply_adds = layer_products(options, seq);
  layers.back().multiply_adds = head_products(options);
  return layers;
}

int64_t& positions(LlamaOptions& options) { return options.max_position_embeddings; }
int64_t& positions(GptOptions& options) { return options.n_positions; }

}  // namespace

std::vector<ModelLayer> language_model_layers(const ModelOptions& options, int64_t seq) {
  return std::visit([seq](const auto& o) { return layers_of(o, seq); }, options);
}

at::Tensor LanguageModel::forward_at(const at::Tensor&, const at::Tensor&) {
  throw StateError("forward_at: this model has no positions to choose; call forward() with whole sequences");
}

at::Tensor LanguageModel::loss(const at::Tensor& tokens, const at::Tensor& targets, const at::Tensor& positions) {
  const at::Tensor logits = positions.defined() ? forward_at(tokens, positions) : forward(tokens);
  return at::cross_entropy_loss(logits.flatten(0, 1).to(at::kFloat), targets.flatten());
}

c10::Device LanguageModel::device() const {
  const auto weights = parameters();
  return weights.empty() ? c10::Device(c10::kCPU) : weights.front().device();
}

std::shared_ptr<LanguageModel> make_language_model(const ModelOptions& options) {
  return std::visit([](const auto& o) { return make(o); }, options);
}

c10::IValue run_layer(const ModelLayer& layer, torch::nn::Module& module, const c10::IValue& value) {
  if (!value.isTuple()) return layer.forward(module, value.toTensor(), {});
  const auto& pair = value.toTupleRef().elements();
  const at::Tensor positions = pair[1].toTensor();
  const at::Tensor result = layer.forward(module, pair[0].toTensor(), positions);
  return layer.is_last ? c10::IValue(result) : c10::IValue(std::make_tuple(result, positions));
}

int64_t parameter_count(const ModelOptions& options) {
  return std::visit(
      [](const auto& o) {
        check_options(o);
        return count(o);
      },
      options);
}

int64_t training_flops_per_token(const ModelOptions& options, int64_t seq) {
  if (seq < 1) throw ConfigError(trireme::str("seq=", seq, ": must be at least 1"));
  return std::visit(
      [seq](const auto& o) {
        check_options(o);
        return training_flops(o, seq);
      },
      options);
}

int64_t vocab_size(const ModelOptions& options) {
  return std::visit([](const auto& o) { return o.vocab_size; }, options);
}

int64_t max_positions(const ModelOptions& options) {
  return std::visit([](auto o) { return positions(o); }, options);
}

ModelOptions with_positions(ModelOptions options, int64_t seq) {
  std::visit([seq](auto& o) { positions(o) = std::max(positions(o), seq); }, options);
  return options;
}

}  // namespace trireme
