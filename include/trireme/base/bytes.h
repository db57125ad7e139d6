// Numbers of bytes, where elements are counted beside them.
#pragma once

#include <c10/core/ScalarType.h>

#include <compare>
#include <cstdint>

namespace trireme {

/// A number of bytes, or an offset in bytes. A plain integer beside it counts elements.
struct Bytes {
  int64_t count = 0;
  auto operator<=>(const Bytes&) const = default;
};
inline Bytes operator+(Bytes a, Bytes b) { return {a.count + b.count}; }
inline Bytes operator*(int64_t times, Bytes bytes) { return {times * bytes.count}; }

/// The size of `numel` elements.
inline Bytes bytes_of(int64_t numel, c10::ScalarType dtype) {
  return numel * Bytes{static_cast<int64_t>(c10::elementSize(dtype))};
}

}  // namespace trireme
