#include "trireme/base/format.h"

#include <fmt/format.h>

#include <array>

namespace trireme {

std::string vformatted(fmt::string_view format, fmt::format_args arguments) { return fmt::vformat(format, arguments); }

std::string grouped(int64_t number) {
  std::string text = fmt::to_string(number);
  for (int64_t at = static_cast<int64_t>(text.size()) - 3; at > (number < 0 ? 1 : 0); at -= 3)
    text.insert(static_cast<size_t>(at), ",");
  return text;
}

std::string size_text(double bytes, int digits) {
  constexpr std::array kUnits = {"bytes", "kB", "MB", "GB", "TB", "PB", "EB"};
  size_t unit = 0;
  for (; bytes >= 1000 && unit + 1 < kUnits.size(); ++unit) bytes /= 1000;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : digits, kUnits[unit]);
}

std::string without_trailing_spaces(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace trireme
