// The models that parity is tested with.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/models.h"
#include "tests/support/parameters.h"
#include "tests/support/zero_stages.h"
#include "trireme/models/llama.h"

namespace trireme::testing {

struct ModelCase {
  std::string name;
  std::function<TrainedModel()> make;  ///< the same weights at every call
};

inline LlamaOptions small_llama() {
  return {.vocab_size = 13,
          .hidden_size = 16,
          .intermediate_size = 24,
          .num_hidden_layers = 2,
          .num_attention_heads = 2,
          .num_key_value_heads = 1,
          .max_position_embeddings = 16};
}

inline TrainedModel make_llama() {
  auto net = std::make_shared<LlamaImpl>(small_llama());
  draw_weights(*net);
  return {net, [net](const MicroBatch& batch) {
            const at::Tensor tokens = to_device_of(*net, tokens_of(batch, 13, {2, 9}));
            return net->loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
          }};
}

}  // namespace trireme::testing
