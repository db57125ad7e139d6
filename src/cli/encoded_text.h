// Text from a model whose tokens are a tokenizer's.
#pragma once

#include <string>

#include "trireme/data/tokenizer.h"
#include "trireme/models/generate.h"

namespace trireme::cli {

/// The text that the model writes behind `prompt`, up to the end of the document. Throws as generate() and
/// Tokenizer::encode_prompt().
std::string continue_text(LanguageModel& model, const Tokenizer& tokenizer, const std::string& prompt,
                          GenerateOptions options);

}  // namespace trireme::cli
