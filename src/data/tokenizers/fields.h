// Keys of one object of tokenizer.json, each of which is to be known.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/json.h"

namespace trireme::tokenizers {

class Fields {
 public:
  /// `place` opens every error: the file and the path of the object in it. Throws DataError where it is no object.
  Fields(const Json& object, std::string place);

  const std::string& place() const { return place_; }
  std::string place_of(std::string_view key) const;

  /// The value at `key`; null where it is absent or null.
  const Json* find(const std::string& key);
  const Json& required(const std::string& key);
  std::string text(const std::string& key);
  std::string text_or(const std::string& key, const std::string& otherwise);
  bool flag_or(const std::string& key, bool otherwise);
  int64_t integer(const std::string& key);
  const Json& list(const std::string& key);
  /// Refuses any value but null, false, an empty text and zero.
  void refuse(const std::string& key, const std::string& why);
  /// Reads keys that change no token.
  void pass_over(const std::vector<std::string>& keys);
  /// Refuses keys that nobody has read.
  void end() const;

  [[noreturn]] void fail(const std::string& key, const std::string& what) const;

 private:
  const Json& object_;
  std::string place_;
  std::set<std::string> read_;
};

/// The `type` of `object`; an error where it has none.
std::string type_of(const Json& object, const std::string& place);

/// The error for a type that is not known: names the place, the type and those that are.
[[noreturn]] void refuse_type(const std::string& place, const std::string& type, const std::vector<std::string>& known);

}  // namespace trireme::tokenizers
