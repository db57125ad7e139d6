// A program for tokenizers_test.py: encode_texts TOKENIZER reads a JSON list of texts, and writes for each its tokens
// with and without those of the template, and what they decode to, in hexadecimal.
#include <cstdio>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/data/tokenizer.h"

namespace {

std::string hexadecimal(const std::string& bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

}  // namespace

int main(int, char** arguments) {
  using trireme::SpecialTokens;
  using trireme::TemplateTokens;
  try {
    const auto tokenizer = trireme::load_tokenizer(arguments[1]);
    const std::string input(std::istreambuf_iterator<char>(std::cin), {});
    nlohmann::json results = nlohmann::json::array();
    for (const auto& text : nlohmann::json::parse(input)) {
      const auto tokens = tokenizer->encode(text.get<std::string>());
      results.push_back({{"tokens", tokens},
                         {"plain", tokenizer->encode(text.get<std::string>(), TemplateTokens::kLeftOut)},
                         {"text", hexadecimal(tokenizer->decode(tokens))},
                         {"whole", hexadecimal(tokenizer->decode(tokens, SpecialTokens::kWritten))}});
    }
    std::cout << nlohmann::json{{"vocab_size", tokenizer->vocab_size()}, {"results", results}}.dump() << "\n";
  } catch (const trireme::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
