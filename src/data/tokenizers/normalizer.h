// Normalizers: what a tokenizer does to a text before it is cut.
#pragma once

#include <memory>
#include <string>

#include "trireme/base/json.h"

namespace trireme::tokenizers {

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  virtual std::string apply(std::string text) const = 0;
};

/// The normalizer that `json` describes; null for null. Throws DataError opening with `place`.
std::unique_ptr<const Normalizer> make_normalizer(const Json& json, const std::string& place);

}  // namespace trireme::tokenizers
