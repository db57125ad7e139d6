#include "cli/text.h"

#include <cstddef>
#include <cstdint>

namespace trireme::cli {
namespace {

// Length of the valid UTF-8 sequence at `at`; 0 where there is none.
size_t sequence_length(const std::string& text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const size_t length = lead < 0x80             ? 1
                        : (lead & 0xE0) == 0xC0 ? 2
                        : (lead & 0xF0) == 0xE0 ? 3
                        : (lead & 0xF8) == 0xF0 ? 4
                                                : 0;
  if (length == 0 || at + length > text.size()) return 0;
  uint32_t code = length == 1 ? lead : lead & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(text[at + i]);
    if ((byte & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte & 0x3F);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800,
                                 0x10000};  // shorter forms exist below: such a sequence is not valid
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  const bool control = code < 0x20 ? code != '\n' && code != '\t' : code >= 0x7F && code < 0xA0;
  return code < kLeast[length] || code > 0x10FFFF || surrogate || control ? 0 : length;
}

}  // namespace

std::string printable(const std::string& text) {
  std::string shown;
  for (size_t at = 0; at < text.size();) {
    const size_t length = sequence_length(text, at);
    shown += length == 0 ? "\uFFFD" : text.substr(at, length);
    at += length == 0 ? 1 : length;
  }
  return shown;
}

}  // namespace trireme::cli
