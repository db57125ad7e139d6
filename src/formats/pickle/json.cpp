#include "trireme/formats/pickle/json.h"

#include <cmath>
#include <nlohmann/json.hpp>

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
    // A list that contains itself twice would be walked 2^depth times: values that were met too often are given up.
    constexpr int kMostSteps = 10'000'000;
    if (depth > kMaxDepth || ++steps_ > kMostSteps) fits_ = false;
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
        for (const Value* item : value.items) array.push_back(convert(*item, depth + 1));
        return array;
      }
      case Kind::kDict: {
        Json object = Json::object();
        for (size_t i = 0; fits_ && i < value.items.size(); i += 2) {
          fits_ = value.items[i]->is(Kind::kString);
          if (fits_) object[value.items[i]->text] = convert(*value.items[i + 1], depth + 1);
        }
        return object;
      }
      default:
        fits_ = false;
        return nullptr;
    }
  }

  bool fits_ = true;
  int steps_ = 0;
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
