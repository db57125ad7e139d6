#include "checkpoint/checksum.h"

#include <xxhash.h>
// Installed with a library that picks AVX2 or AVX-512 when it runs; our own binaries are portable and would get SSE2.
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#endif

namespace trireme {

uint64_t checksum_of(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }

std::string checksum_text(uint64_t checksum) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (int i = 15; i >= 0; --i, checksum >>= 4) text[i] = kDigits[checksum & 15];
  return text;
}

std::optional<uint64_t> parse_checksum(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  uint64_t value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'a' && c <= 'f')) return std::nullopt;
    value = value << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return value;
}

}  // namespace trireme
