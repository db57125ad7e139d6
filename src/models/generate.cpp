#include "trireme/models/generate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "trireme/base/error.h"

namespace trireme {
namespace {

void check(const LanguageModel& model, const std::vector<int64_t>& prompt, const GenerateOptions& o) {
  if (o.max_new_tokens < 0)
    throw ConfigError(trireme::str("max_new_tokens=", o.max_new_tokens, ": must be at least 0"));
  if (!(o.temperature >= 0)) throw ConfigError(trireme::str("temperature=", o.temperature, ": must be at least 0"));
  if (o.top_k < 0) throw ConfigError(trireme::str("top_k=", o.top_k, ": must be at least 1, or 0 for all"));
  if (o.vocab_size < 0) throw ConfigError(trireme::str("vocab_size=", o.vocab_size, ": must be at least 1, or 0"));
  if (prompt.empty()) throw ShapeError("prompt: expected at least one token, got none");
  for (const int64_t token : prompt) {
    if (token < 0 || token >= model.vocab_size()) {
      throw ShapeError(trireme::str("prompt: token ", token, " is outside the vocabulary of ", model.vocab_size()));
    }
  }
}

/// A number in [0, 1) from the generator's bits alone: the standard's distributions differ between libraries.
double uniform(std::mt19937_64& bits) { return static_cast<double>(bits() >> 11) * 0x1p-53; }

int64_t likeliest(const std::vector<double>& logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

int64_t draw(std::vector<double> logits, const GenerateOptions& o, std::mt19937_64& bits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double limit = -INFINITY;
  if (o.top_k > 0 && o.top_k < static_cast<int64_t>(logits.size())) {
    auto sorted = logits;
    std::nth_element(sorted.begin(), sorted.begin() + (o.top_k - 1), sorted.end(), std::greater<>());
    limit = sorted[o.top_k - 1];
  }
  double sum = 0;
  for (auto& logit : logits) {
    logit = logit < limit ? 0 : std::exp((logit - largest) / o.temperature);
    sum += logit;
  }
  double rest = uniform(bits) * sum;
  for (size_t i = 0; i < logits.size(); ++i) {
    rest -= logits[i];
    if (rest < 0) return static_cast<int64_t>(i);
  }
  return likeliest(logits);  // rounding left a hair of the sum
}

/// Feeds tokens to a model with a bounded number of positions.
class Reader {
 public:
  Reader(LanguageModel& model, const GenerateOptions& options) : model_(model), options_(options) {}

  /// Logits after the last of `tokens`, of which only those at the end may be new.
  std::vector<double> read(const std::vector<int64_t>& tokens) {
    auto begin = tokens.end() - 1;
    if (cache_.length == 0 || cache_.length == model_.max_positions()) {
      // Half of the positions are left free, so that the window moves rarely and not at every token.
      const int64_t most =
          cache_.length == 0 ? model_.max_positions() : std::max<int64_t>(1, model_.max_positions() / 2);
      begin = tokens.end() - std::min(static_cast<int64_t>(tokens.size()), most);
      cache_ = {};
    }
    const std::vector<int64_t> window(begin, tokens.end());
    const auto tokens_2d = at::tensor(window, at::kLong).unsqueeze(0).to(model_.device());
    const auto own = model_.decode(tokens_2d, cache_);
    const auto logits = (options_.gather ? options_.gather(own) : own).to(at::kDouble).cpu().contiguous();
    if (logits.numel() != model_.vocab_size())
      throw ShapeError(trireme::str("generate: ", logits.numel(), " logits, and the vocabulary is ",
                                    model_.vocab_size(),
                                    "; where ranks have slices of layers, set GenerateOptions::gather"));
    const auto* first = logits.const_data_ptr<double>();
    return {first, first + logits.numel()};
  }

 private:
  LanguageModel& model_;
  const GenerateOptions& options_;
  KvCache cache_;
};

/// Calls `take` with each new token, one of the first `most` of the vocabulary, until it returns false or
/// max_new_tokens are made.
template <class Take>
void continue_prompt(LanguageModel& model, std::vector<int64_t> tokens, int64_t most, const GenerateOptions& o,
                     Take take) {
  check(model, tokens, o);
  const at::NoGradGuard no_grad;
  std::mt19937_64 bits(o.seed);
  Reader reader(model, o);
  for (int64_t i = 0; i < o.max_new_tokens; ++i) {
    auto logits = reader.read(tokens);
    logits.resize(static_cast<size_t>(most));
    tokens.push_back(o.temperature == 0 ? likeliest(logits) : draw(std::move(logits), o, bits));
    if (!take(tokens.back())) return;
  }
}

}  // namespace

std::vector<int64_t> generate(LanguageModel& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options) {
  std::vector<int64_t> made;
  const int64_t most = options.vocab_size == 0 ? model.vocab_size() : std::min(options.vocab_size, model.vocab_size());
  continue_prompt(model, prompt, most, options, [&](int64_t token) {
    if (token == options.stop) return false;
    made.push_back(token);
    return true;
  });
  return made;
}

std::string generate_text(LanguageModel& model, const std::string& prompt, const GenerateOptions& options) {
  constexpr int64_t kBytes = 256;
  if (model.vocab_size() < kBytes) {
    throw ConfigError(trireme::str("vocab_size=", model.vocab_size(), ": text as bytes needs a vocabulary of 256"));
  }
  std::vector<int64_t> tokens = {0};
  for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
  std::string text;
  // A larger vocabulary has tokens that are no byte, of which a model that has seen little text still thinks much.
  continue_prompt(model, tokens, kBytes, options, [&](int64_t token) {
    if (token == 0) return false;
    text.push_back(static_cast<char>(token));
    return true;
  });
  return text;
}

}  // namespace trireme
