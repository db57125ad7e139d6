// The seal by which ranks of one job know each other's texts in a store where others may write: it is made of the job's
// token.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace trireme::comm {

class Seal {
 public:
  /// An empty token: every text is believed.
  explicit Seal(std::string token) : token_(std::move(token)) {}

  bool has_token() const { return !token_.empty(); }
  /// The begin of the job's keys: says nothing about the token, and without it cannot be guessed.
  std::string prefix() const;
  /// `text`, as it is put under `key`.
  std::string close(const std::string& key, const std::string& text) const;
  /// The text that a rank with this token has put under `key`; nullopt: somebody else has written `sealed`.
  std::optional<std::string> open(const std::string& key, const std::string& sealed) const;

 private:
  std::string token_;
};

}  // namespace trireme::comm
