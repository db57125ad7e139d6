// Shapes: B batch, S sequence, H hidden, N heads, D head size, V vocabulary.
#include "trireme/models/llama.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>

#include "models/layers.h"
#include "models/options_check.h"
#include "models/rope.h"

namespace trireme {
namespace {

class RmsNorm : public torch::nn::Module {
 public:
  RmsNorm(int64_t size, double eps) : weight_(register_parameter("weight", at::ones({size}))), eps_(eps) {}

  at::Tensor forward(const at::Tensor& x) const {
    if (x.scalar_type() == at::kFloat) return at::rms_norm(x, weight_.sizes(), weight_, eps_);
    // In 16 bits the reference rounds before it multiplies by the weight; at::rms_norm rounds after.
    const auto x32 = x.to(at::kFloat);
    const auto scale = at::rsqrt(x32.pow(2).mean(-1, true) + eps_);
    return weight_ * (x32 * scale).to(x.scalar_type());
  }

 private:
  at::Tensor weight_;
  double eps_;
};

std::shared_ptr<WeightModule> projection(int64_t in, int64_t out, double std) {
  return std::make_shared<WeightModule>(std::vector{out, in}, std);
}

class LlamaAttention : public torch::nn::Module {
 public:
  explicit LlamaAttention(const LlamaOptions& o) : head_dim_(head_dim(o)) {
    const int64_t q_size = o.num_attention_heads * head_dim_;
    const int64_t kv_size = o.num_key_value_heads * head_dim_;
    q_proj_ = register_module("q_proj", projection(o.hidden_size, q_size, o.initializer_range));
    k_proj_ = register_module("k_proj", projection(o.hidden_size, kv_size, o.initializer_range));
    v_proj_ = register_module("v_proj", projection(o.hidden_size, kv_size, o.initializer_range));
    o_proj_ = register_module("o_proj", projection(q_size, o.hidden_size, o.initializer_range));
  }

  at::Tensor forward(const at::Tensor& x_BSH, const RopeAngles& angles, KvCache::Layer* cache) const {
    const auto heads = [&](const at::Tensor& y) { return y.unflatten(-1, {-1, head_dim_}); };  // [B, S, N, D]
    // Turned before the transposition, while memory is in the order in which it is read.
    const auto q = apply_rope(heads(at::linear(x_BSH, q_proj_->weight)), angles).transpose(1, 2);
    const auto k = apply_rope(heads(at::linear(x_BSH, k_proj_->weight)), angles).transpose(1, 2);
    const auto v = heads(at::linear(x_BSH, v_proj_->weight)).transpose(1, 2);
    return at::linear(causal_attention(q, k, v, cache), o_proj_->weight);
  }

 private:
  int64_t head_dim_;
  std::shared_ptr<WeightModule> q_proj_, k_proj_, v_proj_, o_proj_;
};

class LlamaMlp : public torch::nn::Module {
 public:
  explicit LlamaMlp(const LlamaOptions& o) {
    gate_proj_ = register_module("gate_proj", projection(o.hidden_size, o.intermediate_size, o.initializer_range));
    up_proj_ = register_module("up_proj", projection(o.hidden_size, o.intermediate_size, o.initializer_range));
    down_proj_ = register_module("down_proj", projection(o.intermediate_size, o.hidden_size, o.initializer_range));
  }

  at::Tensor forward(const at::Tensor& x_BSH) const {
    const auto gate = at::silu(at::linear(x_BSH, gate_proj_->weight));
    return at::linear(gate * at::linear(x_BSH, up_proj_->weight), down_proj_->weight);
  }

 private:
  std::shared_ptr<WeightModule> gate_proj_, up_proj_, down_proj_;
};

class LlamaBlock : public torch::nn::Module {
 public:
  explicit LlamaBlock(const LlamaOptions& o) {
    self_attn_ = register_module("self_attn", std::make_shared<LlamaAttention>(o));
    mlp_ = register_module("mlp", std::make_shared<LlamaMlp>(o));
    input_norm_ = register_module("input_layernorm", std::make_shared<RmsNorm>(o.hidden_size, o.rms_norm_eps));
    post_attention_norm_ =
        register_module("post_attention_layernorm", std::make_shared<RmsNorm>(o.hidden_size, o.rms_norm_eps));
  }

  at::Tensor forward(const at::Tensor& x_BSH, const RopeAngles& angles, KvCache::Layer* cache) const {
    const auto attended_BSH = x_BSH + self_attn_->forward(input_norm_->forward(x_BSH), angles, cache);
    return attended_BSH + mlp_->forward(post_attention_norm_->forward(attended_BSH));
  }

 private:
  std::shared_ptr<LlamaAttention> self_attn_;
  std::shared_ptr<LlamaMlp> mlp_;
  std::shared_ptr<RmsNorm> input_norm_, post_attention_norm_;
};

}  // namespace

/// Everything below the output projection.
class LlamaDecoder : public torch::nn::Module {
 public:
  explicit LlamaDecoder(const LlamaOptions& o) : rope_(head_dim(o), o.rope_theta) {
    const std::vector embedding_shape{o.vocab_size, o.hidden_size};
    embed_tokens_ =
        register_module("embed_tokens", std::make_shared<WeightModule>(embedding_shape, o.initializer_range));
    auto layers = register_module("layers", std::make_shared<LayerList>());
    for (int64_t i = 0; i < o.num_hidden_layers; ++i) {
      blocks_.push_back(layers->register_module(std::to_string(i), std::make_shared<LlamaBlock>(o)));
    }
    norm_ = register_module("norm", std::make_shared<RmsNorm>(o.hidden_size, o.rms_norm_eps));
  }

  /// Undefined `positions`: those behind the cache.
  at::Tensor forward(const at::Tensor& tokens_BS, const at::Tensor& positions, KvCache* cache,
                     bool recomputes = false) {
    auto x_BSH = at::embedding(embed_tokens_->weight, tokens_BS);
    const auto angles = positions.defined()
                            ? rope_.angles(positions, x_BSH.options())
                            : rope_.angles(cache ? cache->length : 0, tokens_BS.size(1), x_BSH.options());
    if (cache) cache->layers.resize(blocks_.size());
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const auto call = [block = blocks_[i], angles, layer = cache ? &cache->layers[i] : nullptr](const at::Tensor& x) {
        return block->forward(x, angles, layer);
      };
      x_BSH = recomputes ? recompute({.name = str("layer ", i)}, call, x_BSH) : call(x_BSH);
    }
    if (cache) cache->length += tokens_BS.size(1);
    return norm_->forward(x_BSH);
  }

  const at::Tensor& embedding() const { return embed_tokens_->weight; }

 private:
  std::shared_ptr<WeightModule> embed_tokens_;
  std::vector<std::shared_ptr<LlamaBlock>> blocks_;
  std::shared_ptr<RmsNorm> norm_;
  RopeCache rope_;
};

LlamaImpl::LlamaImpl(const LlamaOptions& options) : options_(options) {
  check_options(options);
  model_ = register_module("model", std::make_shared<LlamaDecoder>(options));
  if (!options.tie_word_embeddings) {
    lm_head_ =
        register_module("lm_head", projection(options.hidden_size, options.vocab_size, options.initializer_range));
  }
}

at::Tensor LlamaImpl::logits(const at::Tensor& hidden) const {
  return at::linear(hidden, lm_head_ ? lm_head_->weight : model_->embedding());
}

at::Tensor LlamaImpl::forward(const at::Tensor& tokens) { return forward_at(tokens, {}); }

at::Tensor LlamaImpl::forward_at(const at::Tensor& tokens, const at::Tensor& positions) {
  check_tokens(tokens, 0, max_positions());
  return logits(model_->forward(tokens, positions, nullptr, recomputes_layers()));
}

at::Tensor LlamaImpl::decode(const at::Tensor& tokens, KvCache& cache) {
  check_tokens(tokens, cache.length, max_positions());
  check_decode(tokens, cache);
  return logits(model_->forward(tokens, {}, &cache).select(1, -1));
}

std::vector<ModelLayer> llama_layers(const LlamaOptions& options) {
  check_options(options);
  const auto weight = [options] {
    return std::make_shared<WeightModule>(std::vector{options.vocab_size, options.hidden_size},
                                          options.initializer_range);
  };
  const bool is_tied = options.tie_word_embeddings;
  std::vector<ModelLayer> layers;
  layers.push_back({"model.embed_tokens", "Embedding", weight,
                    [most = options.max_position_embeddings](torch::nn::Module& module, const at::Tensor& tokens,
                                                             const at::Tensor&) {
                      check_tokens(tokens, 0, most);
                      return at::embedding(static_cast<WeightModule&>(module).weight, tokens);
                    },
                    is_tied});
  const auto rope = std::make_shared<RopeCache>(head_dim(options), options.rope_theta);
  for (int64_t i = 0; i < options.num_hidden_layers; ++i)
    layers.push_back({str("model.layers.", i), "LlamaBlock",
                      [options] { return std::make_shared<LlamaBlock>(options); },
                      [rope](torch::nn::Module& module, const at::Tensor& x, const at::Tensor& positions) {
                        const RopeAngles angles = positions.defined() ? rope->angles(positions, x.options())
                                                                      : rope->angles(0, x.size(1), x.options());
                        return static_cast<LlamaBlock&>(module).forward(x, angles, nullptr);
                      }});
  layers.push_back({"model.norm", "RmsNorm",
                    [options] { return std::make_shared<RmsNorm>(options.hidden_size, options.rms_norm_eps); },
                    [](torch::nn::Module& module, const at::Tensor& x, const at::Tensor&) {
                      return static_cast<RmsNorm&>(module).forward(x);
                    }});
  layers.push_back({"lm_head", "Linear", weight,
                    [](torch::nn::Module& module, const at::Tensor& x, const at::Tensor&) {
                      return at::linear(x, static_cast<WeightModule&>(module).weight);
                    },
                    is_tied, /*is_last=*/true});
  return layers;
}

}  // namespace trireme
