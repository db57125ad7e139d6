// Option values that every entry point agrees on.
#pragma once

#include "trireme/models/gpt_options.h"
#include "trireme/models/llama_options.h"

namespace trireme {

/// Throw ConfigError naming the key, its value and the fix.
void check_options(const LlamaOptions& options);
void check_options(const GptOptions& options);

inline int64_t head_dim(const LlamaOptions& o) {
  return o.head_dim ? o.head_dim : o.hidden_size / o.num_attention_heads;
}
inline int64_t inner_size(const GptOptions& o) { return o.n_inner ? o.n_inner : 4 * o.n_embd; }

}  // namespace trireme
