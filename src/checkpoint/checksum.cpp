#include "checkpoint/checksum.h"

#include <xxhash.h>
// The library picks AVX2 or AVX-512 when it runs, where it was built to; our own binaries are portable and would get
// SSE2. Debian builds it so and does not install the header that declares it, hence the weak declaration.
extern "C" __attribute__((weak)) XXH64_hash_t XXH3_64bits_dispatch(const void* data, size_t bytes);

namespace trireme {

uint64_t checksum_of(const void* data, size_t bytes) {
  return XXH3_64bits_dispatch ? XXH3_64bits_dispatch(data, bytes) : XXH3_64bits(data, bytes);
}

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
