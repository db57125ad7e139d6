// A sum of doubles that does not depend on their order: each is added to one long fixed-point number, without rounding.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace trireme {

/// For values of 0 and more, up to 2^31 of them between two calls of carry(). Trivially copyable: ranks exchange it.
class ExactSum {
 public:
  void add(double value) {
    if (!std::isfinite(value)) {
      is_finite_ = 0;
      return;
    }
    const uint64_t bits = std::bit_cast<uint64_t>(value);
    const uint64_t exponent = bits >> 52;
    // The value is mantissa * 2^shift, in units of the smallest double.
    const uint64_t mantissa = (bits & ((uint64_t{1} << 52) - 1)) | (exponent != 0 ? uint64_t{1} << 52 : 0);
    const uint64_t shift = exponent != 0 ? exponent - 1 : 0;
    const unsigned __int128 placed = static_cast<unsigned __int128>(mantissa) << (shift % kDigitBits);
    uint64_t* digit = digits_.data() + shift / kDigitBits;
    digit[0] += static_cast<uint32_t>(placed);
    digit[1] += static_cast<uint32_t>(placed >> kDigitBits);
    digit[2] += static_cast<uint32_t>(placed >> 2 * kDigitBits);
  }

  void add(const ExactSum& other) {
    carry();
    ExactSum that = other;
    that.carry();
    for (size_t i = 0; i < digits_.size(); ++i) digits_[i] += that.digits_[i];
    is_finite_ &= that.is_finite_;
  }

  /// The same bits whatever the order was; NaN if a value was not finite.
  double total() const {
    if (is_finite_ == 0) return std::numeric_limits<double>::quiet_NaN();
    ExactSum sum = *this;
    sum.carry();
    double total = 0;
    for (int i = kDigits - 1; i >= 0; --i)
      total += std::ldexp(static_cast<double>(sum.digits_[i]), kDigitBits * i + kSmallestExponent);
    return total;
  }

 private:
  static constexpr int kDigitBits = 32;
  static constexpr int kSmallestExponent = -1074;
  static constexpr int kDigits = (1024 - kSmallestExponent) / kDigitBits + 3;  // and room for carries

  void carry() {
    uint64_t over = 0;
    for (uint64_t& digit : digits_) {
      digit += over;
      over = digit >> kDigitBits;
      digit &= 0xffffffff;
    }
  }

  std::array<uint64_t, kDigits> digits_{};
  uint64_t is_finite_ = 1;
};

}  // namespace trireme
