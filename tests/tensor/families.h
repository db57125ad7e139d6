// Parameters of one layer of small models of each family, as transformers names and shapes them.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "trireme/tensor/partition.h"

namespace trireme::testing {

/// Layers of which one makes what the other takes: `count` heads or features, each a stretch of either's dim.
struct Pair {
  std::string column;
  std::string row;
  int64_t count;
  int matrices = 1;  ///< one behind the other in `column`
};

struct Family {
  const char* preset;
  int64_t heads;
  int64_t key_value_heads;
  const char* parameters;  ///< a line each: name, sizes; "= NAME": tied to it
  std::vector<Pair> pairs;
};

inline PartitionModel model_of(const Family& family) {
  PartitionModel model{.model_type = family.preset, .heads = family.heads, .key_value_heads = family.key_value_heads};
  std::istringstream lines(family.parameters);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    NamedShape parameter;
    words >> parameter.name;
    for (std::string word; words >> word;) {
      if (word == "=")
        parameter.tied.push_back((words >> word, word));
      else
        parameter.shape.push_back(std::stoll(word));
    }
    if (!parameter.name.empty()) model.parameters.push_back(parameter);
  }
  return model;
}

inline constexpr const char* kLlama = R"(
model.embed_tokens.weight 50 24
model.layers.0.self_attn.q_proj.weight 24 24
model.layers.0.self_attn.k_proj.weight 8 24
model.layers.0.self_attn.v_proj.weight 8 24
model.layers.0.self_attn.o_proj.weight 24 24
model.layers.0.mlp.gate_proj.weight 40 24
model.layers.0.mlp.up_proj.weight 40 24
model.layers.0.mlp.down_proj.weight 24 40
model.layers.0.input_layernorm.weight 24
model.layers.0.post_attention_layernorm.weight 24
model.norm.weight 24
lm_head.weight 50 24)";

inline constexpr const char* kQwen2 = R"(
model.embed_tokens.weight 50 24 = lm_head.weight
model.layers.0.self_attn.q_proj.weight 24 24
model.layers.0.self_attn.q_proj.bias 24
model.layers.0.self_attn.k_proj.weight 8 24
model.layers.0.self_attn.k_proj.bias 8
model.layers.0.self_attn.v_proj.weight 8 24
model.layers.0.self_attn.v_proj.bias 8
model.layers.0.self_attn.o_proj.weight 24 24
model.layers.0.mlp.gate_proj.weight 40 24
model.layers.0.mlp.up_proj.weight 40 24
model.layers.0.mlp.down_proj.weight 24 40
model.layers.0.input_layernorm.weight 24
model.layers.0.post_attention_layernorm.weight 24
model.norm.weight 24)";

inline constexpr const char* kGemma = R"(
model.embed_tokens.weight 50 24 = lm_head.weight
model.layers.0.self_attn.q_proj.weight 48 24
model.layers.0.self_attn.k_proj.weight 8 24
model.layers.0.self_attn.v_proj.weight 8 24
model.layers.0.self_attn.o_proj.weight 24 48
model.layers.0.mlp.gate_proj.weight 40 24
model.layers.0.mlp.up_proj.weight 40 24
model.layers.0.mlp.down_proj.weight 24 40
model.layers.0.input_layernorm.weight 24
model.layers.0.post_attention_layernorm.weight 24
model.norm.weight 24)";

inline constexpr const char* kPhi3 = R"(
model.embed_tokens.weight 50 24
model.layers.0.self_attn.o_proj.weight 24 24
model.layers.0.self_attn.qkv_proj.weight 40 24
model.layers.0.mlp.gate_up_proj.weight 80 24
model.layers.0.mlp.down_proj.weight 24 40
model.layers.0.input_layernorm.weight 24
model.layers.0.post_attention_layernorm.weight 24
model.norm.weight 24
lm_head.weight 50 24)";

inline constexpr const char* kMixtral = R"(
model.embed_tokens.weight 50 24
model.layers.0.self_attn.q_proj.weight 24 24
model.layers.0.self_attn.k_proj.weight 8 24
model.layers.0.self_attn.v_proj.weight 8 24
model.layers.0.self_attn.o_proj.weight 24 24
model.layers.0.mlp.gate.weight 2 24
model.layers.0.mlp.experts.gate_up_proj 2 80 24
model.layers.0.mlp.experts.down_proj 2 24 40
model.layers.0.input_layernorm.weight 24
model.layers.0.post_attention_layernorm.weight 24
model.layers.1.block_sparse_moe.gate.weight 2 24
model.layers.1.block_sparse_moe.experts.0.w1.weight 40 24
model.layers.1.block_sparse_moe.experts.0.w2.weight 24 40
model.layers.1.block_sparse_moe.experts.0.w3.weight 40 24
model.norm.weight 24
lm_head.weight 50 24)";

inline constexpr const char* kDeepseekV2 = R"(
model.embed_tokens.weight 50 24
model.layers.0.self_attn.q_a_proj.weight 8 24
model.layers.0.self_attn.q_a_layernorm.weight 8
model.layers.0.self_attn.q_b_proj.weight 60 8
model.layers.0.self_attn.kv_a_proj_with_mqa.weight 14 24
model.layers.0.self_attn.kv_a_layernorm.weight 10
model.layers.0.self_attn.kv_b_proj.weight 66 10
model.layers.0.self_attn.o_proj.weight 24 30
model.layers.0.mlp.gate_proj.weight 40 24
model.layers.0.mlp.up_proj.weight 40 24
model.layers.0.mlp.down_proj.weight 24 40
model.layers.0.input_layernorm.weight 24
model.layers.1.mlp.experts.gate_up_proj 2 28 24
model.layers.1.mlp.experts.down_proj 2 24 14
model.layers.1.mlp.gate.weight 2 24
model.layers.1.mlp.shared_experts.gate_proj.weight 14 24
model.layers.1.mlp.shared_experts.up_proj.weight 14 24
model.layers.1.mlp.shared_experts.down_proj.weight 24 14
model.layers.2.mlp.experts.0.up_proj.weight 14 24
model.layers.2.mlp.experts.0.down_proj.weight 24 14
model.norm.weight 24
lm_head.weight 50 24)";

inline constexpr const char* kBloom = R"(
transformer.word_embeddings.weight 50 24 = lm_head.weight
transformer.word_embeddings_layernorm.weight 24
transformer.h.0.input_layernorm.weight 24
transformer.h.0.self_attention.query_key_value.weight 72 24
transformer.h.0.self_attention.query_key_value.bias 72
transformer.h.0.self_attention.dense.weight 24 24
transformer.h.0.self_attention.dense.bias 24
transformer.h.0.mlp.dense_h_to_4h.weight 96 24
transformer.h.0.mlp.dense_h_to_4h.bias 96
transformer.h.0.mlp.dense_4h_to_h.weight 24 96
transformer.h.0.mlp.dense_4h_to_h.bias 24
transformer.ln_f.weight 24)";

inline constexpr const char* kChatGlm = R"(
transformer.embedding.word_embeddings.weight 50 24
transformer.encoder.layers.0.input_layernorm.weight 24
transformer.encoder.layers.0.self_attention.query_key_value.weight 40 24
transformer.encoder.layers.0.self_attention.query_key_value.bias 40
transformer.encoder.layers.0.self_attention.dense.weight 24 24
transformer.encoder.layers.0.mlp.dense_h_to_4h.weight 80 24
transformer.encoder.layers.0.mlp.dense_4h_to_h.weight 24 40
transformer.encoder.final_layernorm.weight 24
transformer.output_layer.weight 50 24)";

inline constexpr const char* kGpt2 = R"(
transformer.wte.weight 50 24 = lm_head.weight
transformer.wpe.weight 16 24
transformer.h.0.ln_1.weight 24
transformer.h.0.ln_1.bias 24
transformer.h.0.attn.c_attn.weight 24 72
transformer.h.0.attn.c_attn.bias 72
transformer.h.0.attn.c_proj.weight 24 24
transformer.h.0.attn.c_proj.bias 24
transformer.h.0.mlp.c_fc.weight 24 96
transformer.h.0.mlp.c_fc.bias 96
transformer.h.0.mlp.c_proj.weight 96 24
transformer.h.0.mlp.c_proj.bias 24
transformer.ln_f.weight 24)";

inline constexpr const char* kGptNeoX = R"(
gpt_neox.embed_in.weight 50 24
gpt_neox.layers.0.input_layernorm.weight 24
gpt_neox.layers.0.attention.query_key_value.weight 72 24
gpt_neox.layers.0.attention.query_key_value.bias 72
gpt_neox.layers.0.attention.dense.weight 24 24
gpt_neox.layers.0.attention.dense.bias 24
gpt_neox.layers.0.mlp.dense_h_to_4h.weight 40 24
gpt_neox.layers.0.mlp.dense_h_to_4h.bias 40
gpt_neox.layers.0.mlp.dense_4h_to_h.weight 24 40
gpt_neox.layers.0.mlp.dense_4h_to_h.bias 24
embed_out.weight 50 24)";

inline constexpr const char* kOpt = R"(
model.decoder.embed_tokens.weight 50 24 = lm_head.weight
model.decoder.embed_positions.weight 18 24
model.decoder.layers.0.self_attn.k_proj.weight 24 24
model.decoder.layers.0.self_attn.k_proj.bias 24
model.decoder.layers.0.self_attn.v_proj.weight 24 24
model.decoder.layers.0.self_attn.q_proj.weight 24 24
model.decoder.layers.0.self_attn.out_proj.weight 24 24
model.decoder.layers.0.self_attn.out_proj.bias 24
model.decoder.layers.0.self_attn_layer_norm.weight 24
model.decoder.layers.0.fc1.weight 40 24
model.decoder.layers.0.fc1.bias 40
model.decoder.layers.0.fc2.weight 24 40
model.decoder.layers.0.fc2.bias 24
model.decoder.layers.0.final_layer_norm.weight 24)";

inline constexpr const char* kFalcon = R"(
transformer.word_embeddings.weight 50 24 = lm_head.weight
transformer.h.0.self_attention.query_key_value.weight 40 24
transformer.h.0.self_attention.dense.weight 24 24
transformer.h.0.mlp.dense_h_to_4h.weight 96 24
transformer.h.0.mlp.dense_4h_to_h.weight 24 96
transformer.h.0.ln_attn.weight 24
transformer.ln_f.weight 24)";

inline constexpr const char* kBert = R"(
bert.embeddings.word_embeddings.weight 50 24 = cls.predictions.decoder.weight
bert.embeddings.position_embeddings.weight 16 24
bert.embeddings.token_type_embeddings.weight 2 24
bert.embeddings.LayerNorm.weight 24
bert.encoder.layer.0.attention.self.query.weight 24 24
bert.encoder.layer.0.attention.self.query.bias 24
bert.encoder.layer.0.attention.self.key.weight 24 24
bert.encoder.layer.0.attention.self.key.bias 24
bert.encoder.layer.0.attention.self.value.weight 24 24
bert.encoder.layer.0.attention.self.value.bias 24
bert.encoder.layer.0.attention.output.dense.weight 24 24
bert.encoder.layer.0.attention.output.dense.bias 24
bert.encoder.layer.0.attention.output.LayerNorm.weight 24
bert.encoder.layer.0.intermediate.dense.weight 40 24
bert.encoder.layer.0.intermediate.dense.bias 40
bert.encoder.layer.0.output.dense.weight 24 40
bert.encoder.layer.0.output.dense.bias 24
bert.encoder.layer.0.output.LayerNorm.weight 24
cls.predictions.bias 50 = cls.predictions.decoder.bias
cls.predictions.transform.dense.weight 24 24
cls.predictions.transform.LayerNorm.weight 24)";

inline constexpr const char* kT5 = R"(
shared.weight 50 24 = encoder.embed_tokens.weight = decoder.embed_tokens.weight = lm_head.weight
encoder.block.0.layer.0.SelfAttention.q.weight 24 24
encoder.block.0.layer.0.SelfAttention.k.weight 24 24
encoder.block.0.layer.0.SelfAttention.v.weight 24 24
encoder.block.0.layer.0.SelfAttention.o.weight 24 24
encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32 6
encoder.block.0.layer.0.layer_norm.weight 24
encoder.block.0.layer.1.DenseReluDense.wi_0.weight 40 24
encoder.block.0.layer.1.DenseReluDense.wi_1.weight 40 24
encoder.block.0.layer.1.DenseReluDense.wo.weight 24 40
decoder.block.0.layer.1.EncDecAttention.q.weight 24 24
decoder.block.0.layer.1.EncDecAttention.k.weight 24 24
decoder.block.0.layer.1.EncDecAttention.v.weight 24 24
decoder.block.0.layer.1.EncDecAttention.o.weight 24 24
decoder.block.0.layer.2.DenseReluDense.wi.weight 40 24
decoder.block.0.layer.2.DenseReluDense.wo.weight 24 40
encoder.final_layer_norm.weight 24)";

inline std::vector<Pair> llama_pairs() {
  return {{"self_attn.q_proj.weight", "self_attn.o_proj.weight", 6},
          {"mlp.gate_proj.weight", "mlp.down_proj.weight", 40},
          {"mlp.up_proj.weight", "mlp.down_proj.weight", 40}};
}

inline std::vector<Pair> bloom_pairs(const std::string& attention, int64_t features) {
  return {{attention + ".query_key_value.weight", attention + ".dense.weight", 6},
          {"mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight", features}};
}

inline const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {"llama", 6, 2, kLlama, llama_pairs()},
      {"qwen2", 6, 2, kQwen2, llama_pairs()},
      {"gemma", 6, 1, kGemma, llama_pairs()},
      {"phi3", 6, 2, kPhi3, {{"mlp.gate_up_proj.weight", "mlp.down_proj.weight", 40, 2}}},
      {"mixtral",
       6,
       2,
       kMixtral,
       {{"self_attn.q_proj.weight", "self_attn.o_proj.weight", 6},
        {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", 40, 2},
        {"experts.0.w1.weight", "experts.0.w2.weight", 40},
        {"experts.0.w3.weight", "experts.0.w2.weight", 40}}},
      {"deepseek_v2",
       6,
       6,
       kDeepseekV2,
       {{"self_attn.q_b_proj.weight", "self_attn.o_proj.weight", 6},
        {"self_attn.kv_b_proj.weight", "self_attn.o_proj.weight", 6},
        {"0.mlp.gate_proj.weight", "0.mlp.down_proj.weight", 40},
        {"1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj", 14, 2},
        {"2.mlp.experts.0.up_proj.weight", "2.mlp.experts.0.down_proj.weight", 14},
        {"shared_experts.gate_proj.weight", "shared_experts.down_proj.weight", 14}}},
      {"bloom", 6, 6, kBloom, bloom_pairs("self_attention", 96)},
      {"chatglm", 6, 2, kChatGlm, {{"mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight", 40, 2}}},
      {"gpt2",
       6,
       6,
       kGpt2,
       {{"attn.c_attn.weight", "attn.c_proj.weight", 6, 3}, {"c_fc.weight", "mlp.c_proj.weight", 96}}},
      {"gpt_neox", 6, 6, kGptNeoX, bloom_pairs(".attention", 40)},
      {"opt",
       6,
       6,
       kOpt,
       {{"q_proj.weight", "out_proj.weight", 6},
        {"k_proj.weight", "out_proj.weight", 6},
        {"fc1.weight", "fc2.weight", 40}}},
      {"falcon", 6, 2, kFalcon, {{"mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight", 96}}},
      {"bert",
       6,
       6,
       kBert,
       {{"self.query.weight", "attention.output.dense.weight", 6},
        {"self.key.weight", "attention.output.dense.weight", 6},
        {"intermediate.dense.weight", "0.output.dense.weight", 40}}},
      {"t5",
       6,
       6,
       kT5,
       {{"SelfAttention.q.weight", "SelfAttention.o.weight", 6},
        {"EncDecAttention.v.weight", "EncDecAttention.o.weight", 6},
        {"relative_attention_bias.weight", "SelfAttention.o.weight", 6},
        {"wi_1.weight", "1.DenseReluDense.wo.weight", 40},
        {"wi.weight", "2.DenseReluDense.wo.weight", 40}}},
  };
  return all;
}

inline const Family& family(const std::string& preset) {
  for (const Family& one : families())
    if (one.preset == preset) return one;
  throw std::logic_error(preset);
}

}  // namespace trireme::testing
