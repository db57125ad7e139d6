// Layers that both architectures are made of.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/nn/init.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "trireme/models/language_model.h"

namespace trireme {

/// A module with nothing but a weight: an embedding or a projection without bias. How it is applied is the owner's
/// affair.
class WeightModule : public torch::nn::Module {
 public:
  /// Draws the weight from N(0, std).
  WeightModule(const std::vector<int64_t>& shape, double std) : weight(register_parameter("weight", at::empty(shape))) {
    torch::nn::init::normal_(weight, 0, std);
  }

  at::Tensor weight;
};

/// A child per layer, named "0", "1", …
class LayerList : public torch::nn::Module {};

/// Throws ShapeError unless tokens are [B, S] int64 with B, S > 0 and `cached` + S <= max_positions.
void check_tokens(const at::Tensor& tokens, int64_t cached, int64_t max_positions);

/// Throws ShapeError when several tokens come on top of cached ones: the causal mask of that case does not exist here.
void check_decode(const at::Tensor& tokens, const KvCache& cache);

/// Causal attention. q [B, heads, S, D], k and v [B, kv heads, S, D] -> [B, S, heads * D].
/// With `cache`, k and v are appended to it first and q attends to all of it.
at::Tensor causal_attention(const at::Tensor& q, at::Tensor k, at::Tensor v, KvCache::Layer* cache);

}  // namespace trireme
