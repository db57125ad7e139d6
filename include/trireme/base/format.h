// Numbers and tables as text, by fmt, whose headers come with torch. Only format.cpp compiles its implementation.
#pragma once

#include <fmt/base.h>

#include <cstdint>
#include <string>

namespace trireme {

/// formatted() with its arguments packed; not for direct use.
std::string vformatted(fmt::string_view format, fmt::format_args arguments);

/// `format` with its arguments filled in, such as "{:.2f} s" or "{:<10}{:>8}". A format that does not fit its arguments
/// is an error of the compiler. Source: https://fmt.dev/12.1/syntax.
template <class... Arguments>
std::string formatted(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  return vformatted(format.get(), fmt::vargs<Arguments...>{{arguments...}});
}

/// "1,234,567".
std::string grouped(int64_t number);

/// "512 bytes", "1.5 GB": powers of 1000, from kB on with `digits` digits after the point.
std::string size_text(double bytes, int digits = 1);

/// `line` without spaces at its end.
std::string without_trailing_spaces(std::string line);

}  // namespace trireme
