// Llama as a plain libtorch module. Parameter names are Hugging Face's (model.layers.0.self_attn.q_proj.weight, …), so
// that its safetensors files load by name; the formulae are Hugging Face's too, rounding in 16 bits included.
#pragma once

#include <torch/nn/pimpl.h>

#include <memory>

#include "trireme/models/language_model.h"
#include "trireme/models/llama_options.h"

namespace trireme {

class LlamaDecoder;
class WeightModule;

/// The model; Llama is its holder.
class LlamaImpl : public LanguageModel {
 public:
  /// Linear and embedding weights are drawn from N(0, initializer_range), norms are 1.
  ///
  /// Throws    ConfigError: options out of range.
  explicit LlamaImpl(const LlamaOptions& options);

  at::Tensor forward(const at::Tensor& tokens) override;
  at::Tensor forward_at(const at::Tensor& tokens, const at::Tensor& positions) override;
  at::Tensor decode(const at::Tensor& tokens, KvCache& cache) override;
  int64_t vocab_size() const override { return options_.vocab_size; }
  int64_t max_positions() const override { return options_.max_position_embeddings; }
  const LlamaOptions& options() const { return options_; }

 private:
  at::Tensor logits(const at::Tensor& hidden) const;

  LlamaOptions options_;
  std::shared_ptr<LlamaDecoder> model_;
  std::shared_ptr<WeightModule> lm_head_;  // null when tied
};
TORCH_MODULE(Llama);

/// language_model_layers() of a Llama.
std::vector<ModelLayer> llama_layers(const LlamaOptions& options);

}  // namespace trireme
