// Code points of a text that is known to be UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace trireme::tokenizers {

/// Bytes of the code point at the beginning of `text`, which is not empty.
inline size_t letter_bytes(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

/// Bytes of the code point that ends `text`, which is not empty.
inline size_t last_letter_bytes(std::string_view text) {
  size_t bytes = 1;
  while (bytes < text.size() && (static_cast<unsigned char>(text[text.size() - bytes]) & 0xC0) == 0x80) ++bytes;
  return bytes;
}

/// Whether the code point `letter` is white space to Unicode.
bool is_space(std::string_view letter);

/// `text` with the letter that byte-level tokenizers write in place of each byte.
std::string letters_of_bytes(std::string_view text);

/// The bytes that `letters` stand for; `letters` itself where one of them stands for none.
std::string bytes_of_letters(const std::string& letters);

}  // namespace trireme::tokenizers
