// Shapes: B batch, S sequence, H hidden (n_embd), N heads, D head size.
#include "trireme/models/gpt.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "models/layers.h"
#include "models/options_check.h"

namespace trireme {
namespace {

/// x * weight + bias, with the weight stored [in, out].
class Conv1d : public torch::nn::Module {
 public:
  Conv1d(int64_t in, int64_t out, double std)
      : weight_(register_parameter("weight", at::empty({in, out}))),
        bias_(register_parameter("bias", at::zeros({out}))) {
    torch::nn::init::normal_(weight_, 0, std);
  }

  at::Tensor forward(const at::Tensor& x) const {
    return at::addmm(bias_, x.flatten(0, -2), weight_).unflatten(0, x.sizes().slice(0, x.dim() - 1));
  }

 private:
  at::Tensor weight_, bias_;
};

class LayerNorm : public torch::nn::Module {
 public:
  LayerNorm(int64_t size, double eps)
      : weight_(register_parameter("weight", at::ones({size}))),
        bias_(register_parameter("bias", at::zeros({size}))),
        eps_(eps) {}

  at::Tensor forward(const at::Tensor& x) const { return at::layer_norm(x, weight_.sizes(), weight_, bias_, eps_); }

 private:
  at::Tensor weight_, bias_;
  double eps_;
};

double residual_std(const GptOptions& o) {
  return o.initializer_range / std::sqrt(2.0 * static_cast<double>(o.n_layer));
}

class GptAttention : public torch::nn::Module {
 public:
  explicit GptAttention(const GptOptions& o) : heads_(o.n_head) {
    c_attn_ = register_module("c_attn", std::make_shared<Conv1d>(o.n_embd, 3 * o.n_embd, o.initializer_range));
    c_proj_ = register_module("c_proj", std::make_shared<Conv1d>(o.n_embd, o.n_embd, residual_std(o)));
  }

  at::Tensor forward(const at::Tensor& x_BSH, KvCache::Layer* cache) const {
    const auto qkv = c_attn_->forward(x_BSH).chunk(3, -1);
    const auto heads = [&](const at::Tensor& y) { return y.unflatten(-1, {heads_, -1}).transpose(1, 2); };
    return c_proj_->forward(causal_attention(heads(qkv[0]), heads(qkv[1]), heads(qkv[2]), cache));
  }

 private:
  int64_t heads_;
  std::shared_ptr<Conv1d> c_attn_, c_proj_;
};

class GptMlp : public torch::nn::Module {
 public:
  explicit GptMlp(const GptOptions& o) {
    c_fc_ = register_module("c_fc", std::make_shared<Conv1d>(o.n_embd, inner_size(o), o.initializer_range));
    c_proj_ = register_module("c_proj", std::make_shared<Conv1d>(inner_size(o), o.n_embd, residual_std(o)));
  }

  at::Tensor forward(const at::Tensor& x_BSH) const {
    return c_proj_->forward(at::gelu(c_fc_->forward(x_BSH), "tanh"));
  }

 private:
  std::shared_ptr<Conv1d> c_fc_, c_proj_;
};

class GptBlock : public torch::nn::Module {
 public:
  explicit GptBlock(const GptOptions& o) {
    ln_1_ = register_module("ln_1", std::make_shared<LayerNorm>(o.n_embd, o.layer_norm_epsilon));
    attn_ = register_module("attn", std::make_shared<GptAttention>(o));
    ln_2_ = register_module("ln_2", std::make_shared<LayerNorm>(o.n_embd, o.layer_norm_epsilon));
    mlp_ = register_module("mlp", std::make_shared<GptMlp>(o));
  }

  at::Tensor forward(const at::Tensor& x_BSH, KvCache::Layer* cache) const {
    const auto attended_BSH = x_BSH + attn_->forward(ln_1_->forward(x_BSH), cache);
    return attended_BSH + mlp_->forward(ln_2_->forward(attended_BSH));
  }

 private:
  std::shared_ptr<LayerNorm> ln_1_, ln_2_;
  std::shared_ptr<GptAttention> attn_;
  std::shared_ptr<GptMlp> mlp_;
};

}  // namespace

/// Everything below the output projection.
class GptTransformer : public torch::nn::Module {
 public:
  explicit GptTransformer(const GptOptions& o) {
    const std::vector token_shape{o.vocab_size, o.n_embd};
    const std::vector position_shape{o.n_positions, o.n_embd};
    wte_ = register_module("wte", std::make_shared<WeightModule>(token_shape, o.initializer_range));
    wpe_ = register_module("wpe", std::make_shared<WeightModule>(position_shape, o.initializer_range));
    auto layers = register_module("h", std::make_shared<LayerList>());
    for (int64_t i = 0; i < o.n_layer; ++i) {
      blocks_.push_back(layers->register_module(std::to_string(i), std::make_shared<GptBlock>(o)));
    }
    ln_f_ = register_module("ln_f", std::make_shared<LayerNorm>(o.n_embd, o.layer_norm_epsilon));
  }

  /// Undefined `positions`: those behind the cache.
  at::Tensor forward(const at::Tensor& tokens_BS, at::Tensor positions, KvCache* cache, bool recomputes = false) const {
    const int64_t begin = cache ? cache->length : 0;
    if (!positions.defined()) positions = at::arange(begin, begin + tokens_BS.size(1), tokens_BS.options());
    auto x_BSH = at::embedding(wte_->weight, tokens_BS) + at::embedding(wpe_->weight, positions);
    if (cache) cache->layers.resize(blocks_.size());
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const auto call = [block = blocks_[i], layer = cache ? &cache->layers[i] : nullptr](const at::Tensor& x) {
        return block->forward(x, layer);
      };
      x_BSH = recomputes ? recompute({.name = str("layer ", i)}, call, x_BSH) : call(x_BSH);
    }
    if (cache) cache->length += tokens_BS.size(1);
    return ln_f_->forward(x_BSH);
  }

  const at::Tensor& embedding() const { return wte_->weight; }

 private:
  std::shared_ptr<WeightModule> wte_, wpe_;
  std::vector<std::shared_ptr<GptBlock>> blocks_;
  std::shared_ptr<LayerNorm> ln_f_;
};

GptImpl::GptImpl(const GptOptions& options) : options_(options) {
  check_options(options);
  transformer_ = register_module("transformer", std::make_shared<GptTransformer>(options));
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) { return forward_at(tokens, {}); }

at::Tensor GptImpl::forward_at(const at::Tensor& tokens, const at::Tensor& positions) {
  check_tokens(tokens, 0, max_positions());
  return at::linear(transformer_->forward(tokens, positions, nullptr, recomputes_layers()), transformer_->embedding());
}

at::Tensor GptImpl::decode(const at::Tensor& tokens, KvCache& cache) {
  check_tokens(tokens, cache.length, max_positions());
  check_decode(tokens, cache);
  return at::linear(transformer_->forward(tokens, {}, &cache).select(1, -1), transformer_->embedding());
}

std::vector<ModelLayer> gpt_layers(const GptOptions& options) {
  check_options(options);
  const auto weight = [options](int64_t rows) {
    return [options, rows] {
      return std::make_shared<WeightModule>(std::vector{rows, options.n_embd}, options.initializer_range);
    };
  };
  std::vector<ModelLayer> layers;
  layers.push_back(
      {"transformer.wte", "Embedding", weight(options.vocab_size),
       [most = options.n_positions](torch::nn::Module& module, const at::Tensor& tokens, const at::Tensor&) {
         check_tokens(tokens, 0, most);
         return at::embedding(static_cast<WeightModule&>(module).weight, tokens);
       },
       /*is_tied=*/true});
  layers.push_back({"transformer.wpe", "Embedding", weight(options.n_positions),
                    [](torch::nn::Module& module, const at::Tensor& x_BSH, const at::Tensor& positions) {
                      const auto positions_S =
                          positions.defined() ? positions : at::arange(x_BSH.size(1), x_BSH.options().dtype(at::kLong));
                      return x_BSH + at::embedding(static_cast<WeightModule&>(module).weight, positions_S);
                    }});
  for (int64_t i = 0; i < options.n_layer; ++i)
    layers.push_back({str("transformer.h.", i), "GptBlock", [options] { return std::make_shared<GptBlock>(options); },
                      [](torch::nn::Module& module, const at::Tensor& x_BSH, const at::Tensor&) {
                        return static_cast<GptBlock&>(module).forward(x_BSH, nullptr);
                      }});
  layers.push_back({"transformer.ln_f", "LayerNorm",
                    [options] { return std::make_shared<LayerNorm>(options.n_embd, options.layer_norm_epsilon); },
                    [](torch::nn::Module& module, const at::Tensor& x, const at::Tensor&) {
                      return static_cast<LayerNorm&>(module).forward(x);
                    }});
  layers.push_back({"lm_head", "Linear", weight(options.vocab_size),
                    [](torch::nn::Module& module, const at::Tensor& x_BSH, const at::Tensor&) {
                      return at::linear(x_BSH, static_cast<WeightModule&>(module).weight);
                    },
                    /*is_tied=*/true, /*is_last=*/true});
  return layers;
}

}  // namespace trireme
