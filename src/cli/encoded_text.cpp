#include "cli/encoded_text.h"

#include <utility>

namespace trireme::cli {

std::string continue_text(LanguageModel& model, const Tokenizer& tokenizer, const std::string& prompt,
                          GenerateOptions options) {
  options.stop = tokenizer.document_end();
  options.vocab_size = tokenizer.vocab_size();
  std::vector<int64_t> tokens = tokenizer.encode_prompt(prompt);
  const std::vector<int64_t> made = generate(model, tokens, options);
  // Behind other tokens the first one may have a space that it has not by itself.
  const std::string before = tokenizer.decode(tokens);
  tokens.insert(tokens.end(), made.begin(), made.end());
  const std::string whole = tokenizer.decode(tokens);
  return whole.starts_with(before) ? whole.substr(before.size()) : tokenizer.decode(made);
}

}  // namespace trireme::cli
