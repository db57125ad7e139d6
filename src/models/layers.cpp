#include "models/layers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <optional>

#include "trireme/base/error.h"

namespace trireme {

void check_tokens(const at::Tensor& tokens, int64_t cached, int64_t max_positions) {
  if (!tokens.defined() || tokens.dim() != 2 || tokens.scalar_type() != at::kLong || tokens.numel() == 0) {
    throw ShapeError(
        str("tokens: expected a non-empty int64 tensor [batch, sequence], got ",
            tokens.defined() ? trireme::str(tokens.toString(), " ", tokens.sizes()) : "an undefined tensor"));
  }
  if (cached + tokens.size(1) > max_positions) {
    throw ShapeError(str("tokens: ", cached + tokens.size(1), " positions, but the model has ", max_positions,
                         "; shorten the sequence or raise max_position_embeddings (n_positions)"));
  }
}

void check_decode(const at::Tensor& tokens, const KvCache& cache) {
  if (cache.length > 0 && tokens.size(1) != 1) {
    throw ShapeError(str("decode: ", tokens.size(1), " tokens on top of ", cache.length,
                         " cached ones; pass one token per call, or all of them with an empty cache"));
  }
}

at::Tensor causal_attention(const at::Tensor& q, at::Tensor k, at::Tensor v, KvCache::Layer* cache) {
  if (cache) {
    if (cache->keys.defined()) {
      k = at::cat({cache->keys, k}, 2);
      v = at::cat({cache->values, v}, 2);
    }
    cache->keys = k;
    cache->values = v;
  }
  const bool is_causal = q.size(2) > 1;
  const bool grouped = q.size(1) != k.size(1);
  auto out = at::scaled_dot_product_attention(q, k, v, {}, 0.0, is_causal, std::nullopt, grouped);
  return out.transpose(1, 2).flatten(2);
}

}  // namespace trireme
