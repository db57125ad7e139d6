// The shape of a GPT-2. Names and meanings are those of Hugging Face's config.json.
#pragma once

#include <cstdint>

namespace trireme {

/// Members are keys of config.json.
struct GptOptions {
  int64_t vocab_size = 50257;
  int64_t n_embd = 768;
  int64_t n_layer = 12;
  int64_t n_head = 12;
  int64_t n_inner = 0;  ///< 0: 4 * n_embd
  int64_t n_positions = 1024;
  double layer_norm_epsilon = 1e-5;
  double initializer_range = 0.02;
};

}  // namespace trireme
