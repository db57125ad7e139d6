#include "config/section.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "trireme/base/suggest.h"

namespace trireme {
namespace {

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

/// What other libraries call a key, where no edit leads from one name to the other.
std::string name_here(const std::string& key) {
  static const std::map<std::string, std::string> names = {{"learning_rate", "lr"},
                                                           {"batch_size", "train_batch_size"},
                                                           {"micro_batch_size", "train_micro_batch_size_per_gpu"}};
  const auto found = names.find(key);
  return found == names.end() ? key : found->second;
}

bool reads_as_absent(const Json& value) { return value.is_null() || (value.is_string() && value == "auto"); }

/// Whole numbers may be written as 5e8. What is beyond int64_t saturates, so that an infinite budget is the largest
/// one.
bool to_integer(const Json& value, int64_t& result) {
  constexpr int64_t largest = std::numeric_limits<int64_t>::max();
  if (value.is_number_unsigned()) {
    result = static_cast<int64_t>(std::min<uint64_t>(value.get<uint64_t>(), largest));
    return true;
  }
  if (value.is_number_integer()) {
    result = value.get<int64_t>();
    return true;
  }
  if (!value.is_number_float()) return false;
  const double number = value.get<double>();
  if (std::isfinite(number) && number != std::floor(number)) return false;
  constexpr double limit = 9223372036854775808.0;  // 2^63
  result = number >= limit   ? largest
           : number < -limit ? std::numeric_limits<int64_t>::min()
                             : static_cast<int64_t>(number);
  return true;
}

bool is_number_in_quotes(const Json& value) {
  if (!value.is_string()) return false;
  const auto& text = value.get_ref<const std::string&>();
  char* end = nullptr;
  std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0';
}

/// JSON itself has no word for it.
std::string show(const Json& value) {
  const bool infinite = value.is_number_float() && std::isinf(value.get<double>());
  return infinite ? (value > 0 ? "infinity" : "-infinity") : value.dump();
}

std::string one_of(const std::vector<std::string>& choices) {
  std::string words = "one of ";
  for (const std::string& choice : choices) words += (words.back() == ' ' ? "\"" : ", \"") + choice + "\"";
  return words;
}

}  // namespace

const std::string* find_ignoring_case(const std::string& text, const std::vector<std::string>& choices) {
  const auto found =
      std::find_if(choices.begin(), choices.end(), [&](const auto& choice) { return lower(choice) == lower(text); });
  return found == choices.end() ? nullptr : &*found;
}

Section::Section(const Json& json, std::string path, ReadNotes& notes)
    : object_(json), path_(std::move(path)), notes_(&notes) {
  if (object_.is_null()) object_ = Json::object();
  if (object_.is_object()) return;
  throw ConfigError(str(notes_->origin, ": ", path_.empty() ? "the whole file" : "`" + path_ + "`", " is ",
                        object_.dump(), "; expected an object { … }"));
}

bool Section::has(const std::string& key) { return value(key) != nullptr; }

bool Section::is_auto(const std::string& key) {
  know(key);
  const auto found = object_.find(key);
  return found != object_.end() && *found == "auto";
}

const Json* Section::value(const std::string& key) {
  know(key);
  const auto found = object_.find(key);
  return found == object_.end() || reads_as_absent(*found) ? nullptr : &*found;
}

bool Section::flag_or(const std::string& key, bool fallback) {
  const Json* json = value(key);
  if (!json) return fallback;
  if (*json == 0 || *json == 1) return *json == 1;  // as DeepSpeed reads them
  if (!json->is_boolean()) fail(key, "true or false");
  return json->get<bool>();
}

int64_t Section::integer_or(const std::string& key, int64_t fallback, const IntegerRange& range) {
  const Json* json = value(key);
  if (!json) return fallback;
  int64_t result = 0;
  if (!to_integer(*json, result) || result < range.min || result > range.max) fail(key, range.words);
  return result;
}

double Section::number_or(const std::string& key, double fallback, const NumberRange& range) {
  const Json* json = value(key);
  if (!json) return fallback;
  if (!json->is_number()) fail(key, range.words);
  const double result = json->get<double>();
  if (!(result >= range.min && result <= range.max)) fail(key, range.words);
  return result;
}

std::string Section::choice_or(const std::string& key, const std::string& fallback,
                               const std::vector<std::string>& choices) {
  const Json* json = value(key);
  if (!json) return fallback;
  if (!json->is_string()) fail(key, one_of(choices));
  const auto& text = json->get_ref<const std::string&>();
  if (const std::string* choice = find_ignoring_case(text, choices)) return *choice;
  fail(key, one_of(choices) + "." + did_you_mean(text, choices));
}

std::string Section::text_or(const std::string& key, const std::string& fallback) {
  const Json* json = value(key);
  if (!json) return fallback;
  if (!json->is_string()) fail(key, "a string");
  return json->get<std::string>();
}

std::vector<std::string> Section::texts_or(const std::string& key, const std::vector<std::string>& fallback) {
  const Json* json = value(key);
  if (!json) return fallback;
  const bool strings =
      json->is_array() && std::all_of(json->begin(), json->end(), [](const Json& item) { return item.is_string(); });
  if (!strings) fail(key, "a list of strings");
  return json->get<std::vector<std::string>>();
}

std::vector<std::string> Section::text_or_texts(const std::string& key, const std::vector<std::string>& fallback) {
  const Json* json = value(key);
  return json && json->is_string() ? std::vector{json->get<std::string>()} : texts_or(key, fallback);
}

Section Section::section(const std::string& key) {
  const Json* json = value(key);
  return Section(json ? *json : Json(), path_of(key), *notes_);
}

void Section::rename(const std::string& name, const std::string& key, Spelling spelling) {
  know(name);
  if (!object_.contains(name)) return;
  if (object_.contains(key))
    refuse(
        str("`", path_of(name), "` and `", path_of(key), "` are two spellings of one key; keep `", path_of(key), "`"));
  if (spelling == Spelling::kDeprecated)
    notes_->warnings.push_back(
        str(notes_->origin, ": `", path_of(name), "` is deprecated; write `", path_of(key), "`"));
  object_[key] = object_[name];
  object_.erase(name);
  spelled_[key] = name;
}

void Section::finish() const {
  const std::vector<std::string> known(known_.begin(), known_.end());
  for (const auto& item : object_.items()) {
    if (known_.contains(item.key())) continue;
    const std::string hint = did_you_mean(name_here(item.key()), known);
    refuse(str("unknown key `", path_of(item.key()), "`.",
               hint.empty() ? " Remove it; `trireme docs config` lists all keys." : hint));
  }
}

std::string Section::path_of(const std::string& key) const {
  const auto spelled = spelled_.find(key);
  const std::string& name = spelled == spelled_.end() ? key : spelled->second;
  return path_.empty() ? name : path_ + "." + name;
}

void Section::fail(const std::string& key, const std::string& expected) const {
  const Json& json = object_.at(key);
  const bool numeric = expected.find("number") != std::string::npos || expected.find("integer") != std::string::npos;
  const char* fix = numeric && is_number_in_quotes(json) ? "; write it without quotes" : "";
  refuse(str("`", path_of(key), "` is ", show(json), "; expected ", expected, fix));
}

void Section::not_there_yet(const std::string& key, const std::string& fix) const {
  const auto found = object_.find(key);
  refuse(str("`", path_of(key), "` = ", found == object_.end() ? "null" : show(*found), " is not there yet; ", fix),
         ErrorCode::kUnsupported);
}

void Section::refuse(const std::string& message, ErrorCode code) const {
  throw ConfigError(notes_->origin + ": " + message, code);
}

}  // namespace trireme
