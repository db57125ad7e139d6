// Text from a language model, one token after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "trireme/models/language_model.h"

namespace trireme {

/// Options of generate().
struct GenerateOptions {
  int64_t max_new_tokens = 200;
  double temperature = 0.8;          ///< 0: always the likeliest token
  int64_t top_k = 0;                 ///< draw among the k likeliest tokens only; 0: among all
  int64_t vocab_size = 0;            ///< draw among the first so many tokens only, such as a tokenizer's; 0: among all
  std::optional<int64_t> stop = {};  ///< this token ends the text and is not returned
  uint64_t seed = 0;                 ///< the same seed, model and prompt give the same tokens
  /// Gathers logits of which ranks have slices, such as TensorParallel::gather(); empty: logits are whole.
  std::function<at::Tensor(const at::Tensor&)> gather = {};
};

/// Continues `prompt` and returns the new tokens only.
///
/// The random numbers come from `seed` alone, so ranks that hold the same model agree without talking.
/// Cost      one decode() of one token each; when max_positions() is reached, the last half is read again.
/// Requires  under sharding, all ranks call it alike.
/// Throws    ConfigError: an option out of range; ShapeError: an empty prompt, a token outside the vocabulary, logits
///           of a part of it.
std::vector<int64_t> generate(LanguageModel& model, const std::vector<int64_t>& prompt, const GenerateOptions& options);

/// The same for byte-level models: continues a document end and the bytes of `prompt` up to the next document end. With
/// a larger vocabulary only the 256 tokens that are bytes are drawn. The result may hold bytes that are not
/// valid UTF-8. Throws as generate(), and ConfigError: vocabulary below 256.
std::string generate_text(LanguageModel& model, const std::string& prompt, const GenerateOptions& options);

}  // namespace trireme
