#include "trireme/models/language_model.h"

#include <ATen/ops/cross_entropy_loss.h>

#include <algorithm>

#include "models/options_check.h"
#include "trireme/models/gpt.h"
#include "trireme/models/llama.h"

namespace trireme {
namespace {

// Counted apart from construction, so that a model that fits nowhere can be estimated.
int64_t count(const LlamaOptions& o) {
  const int64_t q_size = o.num_attention_heads * head_dim(o);
  const int64_t kv_size = o.num_key_value_heads * head_dim(o);
  const int64_t attention = 2 * o.hidden_size * (q_size + kv_size);
  const int64_t mlp = 3 * o.hidden_size * o.intermediate_size;
  const int64_t norms = 2 * o.hidden_size;
  const int64_t embeddings = (o.tie_word_embeddings ? 1 : 2) * o.vocab_size * o.hidden_size;
  return embeddings + o.num_hidden_layers * (attention + mlp + norms) + o.hidden_size;
}

int64_t count(const GptOptions& o) {
  const int64_t attention = 4 * o.n_embd * o.n_embd + 4 * o.n_embd;
  const int64_t mlp = 2 * o.n_embd * inner_size(o) + inner_size(o) + o.n_embd;
  const int64_t norms = 4 * o.n_embd;
  return (o.vocab_size + o.n_positions) * o.n_embd + o.n_layer * (attention + mlp + norms) + 2 * o.n_embd;
}

std::shared_ptr<LanguageModel> make(const LlamaOptions& options) { return std::make_shared<LlamaImpl>(options); }
std::shared_ptr<LanguageModel> make(const GptOptions& options) { return std::make_shared<GptImpl>(options); }

int64_t& positions(LlamaOptions& options) { return options.max_position_embeddings; }
int64_t& positions(GptOptions& options) { return options.n_positions; }

}  // namespace

at::Tensor LanguageModel::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  return at::cross_entropy_loss(forward(tokens).flatten(0, 1).to(at::kFloat), targets.flatten());
}

std::shared_ptr<LanguageModel> make_language_model(const ModelOptions& options) {
  return std::visit([](const auto& o) { return make(o); }, options);
}

int64_t parameter_count(const ModelOptions& options) {
  return std::visit(
      [](const auto& o) {
        check_options(o);
        return count(o);
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
