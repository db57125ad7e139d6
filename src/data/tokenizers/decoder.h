// Decoders: from the texts of tokens to a text.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "trireme/base/json.h"

namespace trireme::tokenizers {

class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual std::vector<std::string> apply(std::vector<std::string> tokens) const = 0;
};

/// The decoder that `json` describes; null for null. Throws DataError opening with `place`.
std::unique_ptr<const Decoder> make_decoder(const Json& json, const std::string& place);

}  // namespace trireme::tokenizers
