// Language models as plain libtorch modules: they know nothing of ranks, sharding or the engine.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "trireme/models/gpt_options.h"
#include "trireme/models/llama_options.h"
#include "trireme/recompute/recompute.h"

namespace trireme {

/// Keys and values of the tokens read so far, per layer; for generation only.
struct KvCache {
  struct Layer {
    at::Tensor keys;    ///< [B, heads, length, head size]
    at::Tensor values;  ///< likewise
  };
  std::vector<Layer> layers;  ///< empty until the first call
  int64_t length = 0;         ///< tokens read
};

/// B batch, S sequence, V vocabulary.
class LanguageModel : public torch::nn::Module, public RecomputesLayers {
 public:
  /// Shapes    tokens [B, S] int64 -> logits [B, S, V] in the dtype of the weights.
  /// Throws    ShapeError: tokens not 2-D int64, or longer than max_positions().
  virtual at::Tensor forward(const at::Tensor& tokens) = 0;
  /// The same of tokens that are a part of longer sequences.
  ///
  /// Shapes    positions [1, S] int64, each below max_positions().
  /// Throws    ShapeError: as forward(); StateError: a model that does not know of positions.
  virtual at::Tensor forward_at(const at::Tensor& tokens, const at::Tensor& positions);

  /// Logits of the last token only, [B, V]; appends the tokens to `cache`.
  ///
  /// Requires  an empty cache, or one token per sequence; called without gradients.
  /// Throws    ShapeError: as forward(), counting the cached tokens; several tokens on a filled cache.
  virtual at::Tensor decode(const at::Tensor& tokens, KvCache& cache) = 0;

  /// Mean cross entropy in nats per token, computed in fp32. Targets of -100 do not count.
  ///
  /// Shapes    tokens [B, S], targets [B, S] int64 -> scalar, fp32. `positions` as forward_at(); undefined: from 0 on.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, const at::Tensor& positions = {});

  /// Training keeps the inputs of the layers alone; each layer is computed again in backward.
  void recompute_layers(bool on) override { recomputes_layers_ = on; }

  virtual int64_t vocab_size() const = 0;
  virtual int64_t max_positions() const = 0;

  /// Where the weights are; the host for a model without any.
  c10::Device device() const;

 protected:
  bool recomputes_layers() const { return recomputes_layers_; }

 private:
  bool recomputes_layers_ = false;
};

using ModelOptions = std::variant<LlamaOptions, GptOptions>;

/// A built-in name (model_names()) or the path of a JSON file in Hugging Face's config.json form (`model_type` llama or
/// gpt2).
///
/// Throws    ConfigError naming the key, its value and the fix: unknown name, an unsupported model_type or feature
///           (rope_scaling, attention_bias, …), a value out of range; IoError: the file cannot be read.
ModelOptions model_options(const std::string& name_or_path);

/// The same from the text of such a file; `origin` opens every error message. Throws ConfigError.
ModelOptions model_options_from_json(const std::string& text, const std::string& origin);

/// The built-in models: llama-3m, llama-10m, llama-130m, llama-1b, llama-8b, gpt2.
const std::vector<std::string>& model_names();

/// Makes the model with freshly drawn weights.
///
/// Throws    ConfigError: options out of range.
std::shared_ptr<LanguageModel> make_language_model(const ModelOptions& options);

/// One of the layers that a model's forward() passes in order, for a pipeline: the first takes tokens [B, S], each
/// other one the result of the one before, the last returns logits [B, S, V]. Undefined `positions` ([S] or [1, S]) are
/// 0, 1, 2, …; where a rank has a part of the sequence, they are given.
struct ModelLayer {
  std::string name;  ///< that its parameters begin with in the whole model: "model.layers.3"
  std::string type;  ///< name of its class
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  /// Called with what `make` returned.
  std::function<at::Tensor(torch::nn::Module&, const at::Tensor& value, const at::Tensor& positions)> forward;
  bool is_tied = false;  ///< shares its "weight" with the other such layer
  bool is_last = false;
  int64_t multiply_adds = 0;  ///< of a token's forward, counted as training_flops_per_token() does
};
/// The layers of make_language_model(options), which will see sequences of `seq` tokens.
/// Throws    ConfigError: options out of range.
std::vector<ModelLayer> language_model_layers(const ModelOptions& options, int64_t seq);
/// `layer` on a value between layers of a pipeline: what ModelLayer says, or a pair of it and positions, which every
/// layer but the last hands on.
c10::IValue run_layer(const ModelLayer& layer, torch::nn::Module& module, const c10::IValue& value);

/// Parameters of such a model, tied ones once; nothing is allocated.
int64_t parameter_count(const ModelOptions& options);
/// Floating point operations of one token's forward and backward in sequences of `seq` tokens, as PaLM counts them:
///   6 * (weights that are factors of a matrix product) + 12 * layers * heads * head size * seq.
/// The output head is such a factor, also where it is the token embedding; looking a row up, norms and biases are not
/// counted, nor is recomputation; attention is not halved for causality.
///
/// Throws    ConfigError: options out of range, `seq` below 1.
/// Source    PaLM, arXiv:2204.02311, appendix B. Test: training_flops_test.cpp.
int64_t training_flops_per_token(const ModelOptions& options, int64_t seq);
int64_t vocab_size(const ModelOptions& options);
int64_t max_positions(const ModelOptions& options);
/// The same with room for sequences of `seq` tokens (Llama's positions cost nothing; GPT's are weights).
ModelOptions with_positions(ModelOptions options, int64_t seq);
/// The options in Hugging Face's config.json form: model_options() of a file with this text gives them back.
std::string config_json(const ModelOptions& options);

}  // namespace trireme
