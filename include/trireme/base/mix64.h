// Mixes the bits of a number.
#pragma once

#include <cstdint>

namespace trireme {

/// The next number of SplitMix64 after the state `x`: neighbours have nothing in common, and 0 is no fixed point. It
/// stays the same for ever: seeds, splits and orders of saved runs depend on it.
/// Source    Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195.
constexpr uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace trireme
