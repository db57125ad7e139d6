// GPT-2 as a plain libtorch module, with Hugging Face's parameter names (transformer.h.0.attn.c_attn.weight, …) and
// layouts: its projections are stored [in, out]. No dropout. The output weight is the token embedding.
#pragma once

#include <torch/nn/pimpl.h>

#include <memory>
#include <vector>

#include "trireme/models/gpt_options.h"
#include "trireme/models/language_model.h"

namespace trireme {

class GptTransformer;

/// The model; Gpt is its holder.
class GptImpl : public LanguageModel {
 public:
  /// Weights are drawn from N(0, initializer_range), those that add to the residual stream from
  /// N(0, initializer_range / sqrt(2 * n_layer)); biases are 0, norms 1.
  ///
  /// Throws    ConfigError: options out of range.
  explicit GptImpl(const GptOptions& options);

  at::Tensor forward(const at::Tensor& tokens) override;
  at::Tensor forward_at(const at::Tensor& tokens, const at::Tensor& positions) override;
  at::Tensor decode(const at::Tensor& tokens, KvCache& cache) override;
  int64_t vocab_size() const override { return options_.vocab_size; }
  int64_t max_positions() const override { return options_.n_positions; }
  const GptOptions& options() const { return options_; }

 private:
  GptOptions options_;
  std::shared_ptr<GptTransformer> transformer_;
};
TORCH_MODULE(Gpt);

/// The model's layers, for a pipeline. Throws ConfigError: options out of range.
std::vector<ModelLayer> gpt_layers(const GptOptions& options);

}  // namespace trireme
