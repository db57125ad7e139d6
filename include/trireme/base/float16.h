// bf16 and fp16 as the bits in memory, and their conversions, for loops that are compiled once per instruction set.
#pragma once

#include <c10/util/Half.h>

#include <bit>
#include <cstdint>
#include <type_traits>

namespace trireme {

/// A bf16 number as its bits.
struct BFloat16 {
  uint16_t bits;
};
/// An fp16 number as its bits.
struct Float16 {
  uint16_t bits;
};

// Always inlined: a function of its own would be compiled for another instruction set than the loop around it.
__attribute__((always_inline)) inline float widen(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
__attribute__((always_inline)) inline float widen(Float16 value) {
  return c10::detail::fp16_ieee_to_fp32_value(value.bits);
}
/// A number of a type that needs no widening, as it is.
template <class T>
__attribute__((always_inline)) inline T widen(T value) {
  return value;
}

/// Rounds to nearest, ties to even, as c10::BFloat16 and c10::Half do.
template <class T, class A>
__attribute__((always_inline)) inline T narrow(A value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(value != value ? 0x7fc0 : rounded)};
  } else if constexpr (std::is_same_v<T, Float16>) {
    return {c10::detail::fp16_ieee_from_fp32_value(value)};
  } else {
    return static_cast<T>(value);
  }
}

}  // namespace trireme
