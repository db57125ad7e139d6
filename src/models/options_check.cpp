#include "models/options_check.h"

#include <initializer_list>

#include "trireme/base/error.h"

namespace trireme {
namespace {

template <class Value>
struct Named {
  const char* key;
  Value value;
};

void check_sizes(std::initializer_list<Named<int64_t>> sizes) {
  for (const auto& [key, value] : sizes) {
    if (value <= 0) throw ConfigError(str(key, "=", value, ": must be at least 1"));
  }
}

void check_numbers(std::initializer_list<Named<double>> numbers) {
  for (const auto& [key, value] : numbers) {
    if (!(value > 0)) throw ConfigError(str(key, "=", value, ": must be greater than 0"));
  }
}

void check_divides(Named<int64_t> whole, Named<int64_t> part) {
  if (whole.value % part.value != 0) {
    throw ConfigError(str(whole.key, "=", whole.value, " is not a multiple of ", part.key, "=", part.value));
  }
}

}  // namespace

void check_options(const LlamaOptions& o) {
  check_sizes({{"vocab_size", o.vocab_size},
               {"hidden_size", o.hidden_size},
               {"intermediate_size", o.intermediate_size},
               {"num_hidden_layers", o.num_hidden_layers},
               {"num_attention_heads", o.num_attention_heads},
               {"num_key_value_heads", o.num_key_value_heads},
               {"max_position_embeddings", o.max_position_embeddings}});
  check_numbers(
      {{"rms_norm_eps", o.rms_norm_eps}, {"rope_theta", o.rope_theta}, {"initializer_range", o.initializer_range}});
  if (o.head_dim < 0) throw ConfigError(str("head_dim=", o.head_dim, ": must be at least 1, or left out"));
  check_divides({"num_attention_heads", o.num_attention_heads}, {"num_key_value_heads", o.num_key_value_heads});
  if (!o.head_dim) {
    check_divides({"hidden_size", o.hidden_size}, {"num_attention_heads", o.num_attention_heads});
  }
  if (head_dim(o) % 2 != 0) {
    throw ConfigError(str("head_dim=", head_dim(o),
                          " (hidden_size / num_attention_heads unless given): ", "rotary embeddings need an even one"));
  }
}

void check_options(const GptOptions& o) {
  check_sizes({{"vocab_size", o.vocab_size},
               {"n_embd", o.n_embd},
               {"n_layer", o.n_layer},
               {"n_head", o.n_head},
               {"n_positions", o.n_positions}});
  check_numbers({{"layer_norm_epsilon", o.layer_norm_epsilon}, {"initializer_range", o.initializer_range}});
  if (o.n_inner < 0) throw ConfigError(str("n_inner=", o.n_inner, ": must be at least 1, or left out"));
  check_divides({"n_embd", o.n_embd}, {"n_head", o.n_head});
}

}  // namespace trireme
