#include "trireme/formats/pickle/json.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "trireme/formats/pickle/pickle.h"

namespace trireme::pickle {
namespace {

class ToJson {
 public:
  std::optional<Json> run(const Value& value) {
    Json json = convert(value, 0);
    if (!fits_) return std::nullopt;
    return json;
  }

 private:
  Json convert(const Value& value, int depth) {
    if (depth > kMaxDepth || !may_be_met(value)) fits_ = false;
    if (!fits_) return nullptr;
    switch (value.kind) {
      case Kind::kNone:
        return nullptr;
      case Kind::kBool:
        return value.flag;
      case Kind::kInt:
        return value.integer;
      case Kind::kFloat:
        fits_ = std::isfinite(value.real);
        return value.real;
      case Kind::kString:
        return value.text;
      case Kind::kList:
      case Kind::kTuple: {
        Json array = Json::array();
        for (size_t i = 0; fits_ && i < value.items.size(); ++i) array.push_back(convert(*value.items[i], depth + 1));
        return array;
      }
      case Kind::kDict:
        return convert_dict(value, depth);
      default:
        fits_ = false;
        return nullptr;
    }
  }

  /// The last value of a key that stands twice counts, as in Python. Json itself would search linearly.
  Json convert_dict(const Value& dict, int depth) {
    Json object = Json::object();
    auto& members = object.get_ref<Json::object_t&>();
    std::unordered_map<std::string_view, size_t> places;
    for (size_t i = 0; fits_ && i < dict.items.size(); i += 2) {
      const Value& key = *dict.items[i];
      fits_ = key.is(Kind::kString) && may_be_met(key);
      if (!fits_) break;
      Json item = convert(*dict.items[i + 1], depth + 1);
      const auto [place, is_new] = places.emplace(key.text, members.size());
      if (is_new)
        members.emplace_back(key.text, std::move(item));
      else
        (members.begin() + static_cast<std::ptrdiff_t>(place->second))->second = std::move(item);
    }
    return object;
  }

  /// A pickle names a value again with two bytes, and JSON writes it again: a text of a megabyte a million times, or a
  /// list that contains itself twice 2^depth times. What comes again is counted, and given up where it is too much.
  bool may_be_met(const Value& value) {
    constexpr size_t kBytesOfItem = 64;
    const size_t bytes = value.text.size() + value.items.size() * kBytesOfItem;
    if (bytes == 0 || met_.insert(&value).second) return true;
    repeated_bytes_ += bytes;
    return repeated_bytes_ <= kMostRepeatedBytes;
  }

  static constexpr size_t kMostRepeatedBytes = size_t{16} << 20;

  bool fits_ = true;
  std::unordered_set<const Value*> met_;  ///< texts, lists and dicts
  size_t repeated_bytes_ = 0;
};

}  // namespace

std::optional<Json> to_json(const Value& value) { return ToJson().run(value); }

Value* from_json(Document& document, const Json& json) {
  if (json.is_boolean()) return document.boolean(json.get<bool>());
  if (json.is_number_integer() && !(json.is_number_unsigned() && json.get<uint64_t>() > uint64_t{INT64_MAX}))
    return document.integer(json.get<int64_t>());
  if (json.is_number()) return document.real(json.get<double>());
  if (json.is_string()) return document.string(json.get<std::string>());
  if (json.is_array()) {
    std::vector<Value*> items;
    for (const Json& item : json) items.push_back(from_json(document, item));
    return document.list(std::move(items));
  }
  if (!json.is_object()) return document.none();
  Document::Pairs pairs;
  for (const auto& [key, item] : json.items()) pairs.emplace_back(key, from_json(document, item));
  return document.dict(pairs);
}

}  // namespace trireme::pickle
