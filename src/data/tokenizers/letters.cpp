#include "data/tokenizers/letters.h"

#include <array>
#include <cstdint>
#include <unordered_map>

namespace trireme::tokenizers {
namespace {

std::string utf8_of(uint32_t code) {  // below U+0800, which is all that is needed
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

// Bytes that are printable in Latin-1 stand for themselves, the others are those from U+0100 on.
std::array<std::string, 256> make_letters() {
  std::array<std::string, 256> letters;
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool is_printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    letters[byte] = utf8_of(is_printable ? byte : next++);
  }
  return letters;
}

const std::array<std::string, 256>& letters() {
  static const auto kLetters = make_letters();
  return kLetters;
}

const std::unordered_map<std::string, char>& bytes_by_letter() {
  static const auto kBytes = [] {
    std::unordered_map<std::string, char> bytes;
    for (size_t byte = 0; byte < 256; ++byte) bytes[letters()[byte]] = static_cast<char>(byte);
    return bytes;
  }();
  return kBytes;
}

}  // namespace

bool is_space(std::string_view letter) {
  if (letter.size() == 1) return letter[0] == ' ' || (letter[0] >= '\t' && letter[0] <= '\r');
  if (letter.size() == 2) return letter == "\u0085" || letter == "\u00a0";
  if (letter.size() != 3) return false;
  if (letter >= "\u2000" && letter <= "\u200a") return true;
  return letter == "\u1680" || letter == "\u2028" || letter == "\u2029" || letter == "\u202f" || letter == "\u205f" ||
         letter == "\u3000";
}

std::string letters_of_bytes(std::string_view text) {
  std::string written;
  written.reserve(text.size() + text.size() / 4);
  for (const char byte : text) written += letters()[static_cast<unsigned char>(byte)];
  return written;
}

std::string bytes_of_letters(const std::string& letters) {
  std::string bytes;
  for (size_t at = 0; at < letters.size();) {
    const size_t length = letter_bytes(std::string_view(letters).substr(at));
    const auto found = bytes_by_letter().find(letters.substr(at, length));
    if (found == bytes_by_letter().end()) return letters;
    bytes += found->second;
    at += length;
  }
  return bytes;
}

}  // namespace trireme::tokenizers
