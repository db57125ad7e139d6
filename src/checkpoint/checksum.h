// XXH3-64 over bytes, and its text form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

uint64_t checksum_of(const void* data, size_t bytes);
inline uint64_t checksum_of(std::string_view text) { return checksum_of(text.data(), text.size()); }

/// 16 lower-case hexadecimal digits.
std::string checksum_text(uint64_t checksum);
std::optional<uint64_t> parse_checksum(std::string_view text);

}  // namespace trireme
