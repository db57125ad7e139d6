#include "data/tokenizers/fields.h"

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/base/words.h"

namespace trireme::tokenizers {
namespace {

const Json& checked_object(const Json& object, const std::string& place) {
  if (!object.is_object())
    throw DataError(trireme::str(place, place.ends_with(": ") ? "this" : "", " is ", excerpt(object.dump()),
                                 "; expected an object"));
  return object;
}

}  // namespace

Fields::Fields(const Json& object, std::string place)
    : object_(checked_object(object, place)), place_(std::move(place)) {}

std::string Fields::place_of(std::string_view key) const {
  return place_.ends_with(": ") ? trireme::str(place_, key) : trireme::str(place_, ".", key);
}

void Fields::fail(const std::string& key, const std::string& what) const {
  const auto found = object_.find(key);
  const std::string value = found == object_.end() ? "is not there" : "is " + excerpt(found->dump(), 80);
  throw DataError(trireme::str(place_of(key), " ", value, "; ", what));
}

const Json* Fields::find(const std::string& key) {
  read_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

const Json& Fields::required(const std::string& key) {
  const Json* value = find(key);
  if (value == nullptr) fail(key, "a tokenizer needs it");
  return *value;
}

std::string Fields::text(const std::string& key) {
  const Json& value = required(key);
  if (!value.is_string()) fail(key, "expected a text");
  return value.get<std::string>();
}

std::string Fields::text_or(const std::string& key, const std::string& otherwise) {
  return find(key) == nullptr ? otherwise : text(key);
}

bool Fields::flag_or(const std::string& key, bool otherwise) {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) fail(key, "expected true or false");
  return value->get<bool>();
}

int64_t Fields::integer(const std::string& key) {
  const Json& value = required(key);
  if (!value.is_number_integer() || value.get<int64_t>() < 0 || value.get<int64_t>() > INT32_MAX)
    fail(key, "expected a whole number of at least 0 that fits 32 bits");
  return value.get<int64_t>();
}

const Json& Fields::list(const std::string& key) {
  const Json& value = required(key);
  if (!value.is_array()) fail(key, "expected a list");
  return value;
}

void Fields::refuse(const std::string& key, const std::string& why) {
  const Json* value = find(key);
  const bool is_off =
      value == nullptr || *value == false || *value == "" || (value->is_number() && value->get<double>() == 0);
  if (!is_off) fail(key, why);
}

void Fields::pass_over(const std::vector<std::string>& keys) { read_.insert(keys.begin(), keys.end()); }

void Fields::end() const {
  for (const auto& item : object_.items())
    if (!read_.contains(item.key()))
      fail(item.key(), "this key is not known here, so tokens could be others; train with a tokenizer without it");
}

std::string type_of(const Json& object, const std::string& place) {
  Fields fields(object, place);
  return fields.text("type");
}

void refuse_type(const std::string& place, const std::string& type, const std::vector<std::string>& known) {
  throw DataError(trireme::str(place, ".type is `", excerpt(type, 80), "`, which is not known here; known are ",
                               joined(known, ", "),
                               ". Encode the text by the package tokenizers, and give the tokens as a .npy"));
}

}  // namespace trireme::tokenizers
