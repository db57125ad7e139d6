// The models that parity is tested with, and the ways of sharding that must not change what they learn.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/models.h"
#include "trireme/models/llama.h"
#include "trireme/pager/pager.h"

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

struct Variant {
  const char* name;
  int stage;
  GatherPolicy gather;
};

inline const std::vector<Variant> kVariants = {{"stage 0", 0, GatherPolicy::kAuto},
                                               {"stage 1", 1, GatherPolicy::kAuto},
                                               {"stage 2", 2, GatherPolicy::kAuto},
                                               {"stage 3 shared", 3, GatherPolicy::kShared},
                                               {"stage 3 copy", 3, GatherPolicy::kCopy}};

/// Several units in a small model, released as early as possible, and nothing but NaNs in what is released.
inline PagerPolicy harsh_policy(const Variant& variant) {
  PagerPolicy policy;
  policy.stage = variant.stage;
  policy.gather = variant.gather;
  policy.poison = true;
  policy.units.merge_below_bytes = 0;
  policy.live_bytes = 0;
  return policy;
}

inline std::map<std::string, at::Tensor> parameters_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : module.named_parameters()) tensors[item.key()] = item.value().detach().clone();
  return tensors;
}

}  // namespace trireme::testing
