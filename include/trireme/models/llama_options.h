// The shape of a Llama. Names and meanings are those of Hugging Face's config.json.
#pragma once

#include <cstdint>

namespace trireme {

/// Members are keys of config.json.
struct LlamaOptions {
  int64_t vocab_size = 32000;
  int64_t hidden_size = 768;
  int64_t intermediate_size = 2048;
  int64_t num_hidden_layers = 12;
  int64_t num_attention_heads = 12;
  int64_t num_key_value_heads = 12;  ///< fewer than num_attention_heads: grouped-query attention
  int64_t head_dim = 0;              ///< 0: hidden_size / num_attention_heads
  int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
};

}  // namespace trireme
