#include "comm/meeting/seal.h"

#include <c10/util/hash.h>

#include <utility>

#include "trireme/base/format.h"

namespace trireme::comm {
namespace {

constexpr size_t kBlockBytes = 64;  // of SHA-1
constexpr size_t kDigits = 40;      // of its result, in hexadecimal

/// The 20 bytes that `digits` say.
std::string raw_bytes(const std::string& digits) {
  std::string bytes;
  for (size_t at = 0; at + 1 < digits.size(); at += 2)
    bytes.push_back(static_cast<char>(std::stoi(digits.substr(at, 2), nullptr, 16)));
  return bytes;
}

/// HMAC-SHA1 in hexadecimal. Source: RFC 2104.
std::string hmac(const std::string& secret, const std::string& text) {
  std::string inner = secret.size() > kBlockBytes ? raw_bytes(c10::sha1(secret).str()) : secret;
  inner.resize(kBlockBytes, '\0');
  std::string outer = inner;
  for (char& each : inner) each = static_cast<char>(each ^ 0x36);
  for (char& each : outer) each = static_cast<char>(each ^ 0x5c);
  return c10::sha1(outer + raw_bytes(c10::sha1(inner + text).str())).str();
}

}  // namespace

std::string Seal::prefix() const { return has_token() ? hmac(token_, "prefix") + "/" : ""; }

std::string Seal::close(const std::string& key, const std::string& text) const {
  // The key's length keeps key and text apart.
  return has_token() ? hmac(token_, formatted("{} {} {}", key.size(), key, text)) + text : text;
}

std::optional<std::string> Seal::open(const std::string& key, const std::string& sealed) const {
  if (!has_token()) return sealed;
  if (sealed.size() < kDigits) return std::nullopt;
  std::string text = sealed.substr(kDigits);
  return close(key, text) == sealed ? std::optional(std::move(text)) : std::nullopt;
}

}  // namespace trireme::comm
