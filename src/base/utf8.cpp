#include "trireme/base/utf8.h"

#include <cstdint>

namespace trireme {
namespace {

/// The bytes of the code point that `text` begins with, in its shortest form and no surrogate; 0: none.
size_t code_point_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t k = 1; k < length; ++k)
    if ((byte(k) & 0xC0) != 0x80) return 0;
  if (length > 2) {
    const uint8_t second = byte(1);
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second >= 0xA0) || (lead == 0xF0 && second < 0x90) ||
        (lead == 0xF4 && second >= 0x90))
      return 0;
  }
  return length;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t bytes = code_point_bytes(text);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

std::string excerpt(std::string_view text, size_t most_bytes) {
  std::string result;
  while (!text.empty()) {
    const size_t bytes = code_point_bytes(text);
    const bool is_plain = bytes > 0 && static_cast<uint8_t>(text[0]) >= 0x20 && text[0] != 0x7f;
    if (result.size() + (is_plain ? bytes : 1) > most_bytes) return result + "…";
    result += is_plain ? text.substr(0, bytes) : "?";
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return result;
}

}  // namespace trireme
