// Hashes that stay the same for ever: splits, orders and fingerprints of saved runs depend on them.
#pragma once

#include <cstdint>
#include <string_view>

#include "trireme/base/mix64.h"

namespace trireme {

/// FNV-1a of `text`, started from `seed` and mixed: its own upper bits are weak for short texts.
constexpr uint64_t hash_text(std::string_view text, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325 ^ mix64(seed);
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return mix64(hash);
}

}  // namespace trireme
