// Hashes that stay the same for ever: splits, orders and fingerprints of saved runs depend on them.
#pragma once

#include <cstdint>
#include <string_view>

namespace trireme {

/// Mixes all bits (the finalizer of splitmix64, after its increment, so that 0 is no fixed point).
constexpr uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// FNV-1a of `text`, started from `seed` and mixed: its own upper bits are weak for short texts.
constexpr uint64_t hash_text(std::string_view text, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325 ^ mix64(seed);
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return mix64(hash);
}

}  // namespace trireme
