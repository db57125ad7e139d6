#include "config/document/document.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "trireme/base/suggest.h"
#include "trireme/base/utf8.h"

namespace trireme {
namespace {

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

bool is_inside(const std::string& path, const std::string& section) {
  return path.starts_with(section) && (path.size() == section.size() || path[section.size()] == '.');
}

std::string one_of(const std::vector<std::string>& choices) {
  std::string words = "one of ";
  for (const std::string& choice : choices) words += (words.back() == ' ' ? "\"" : ", \"") + choice + "\"";
  return words;
}

}  // namespace

std::string lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

const Json* value_at(const Json& json, const std::string& path) {
  const size_t dot = path.find('.');
  const auto found = json.is_object() ? json.find(path.substr(0, dot)) : json.end();
  if (!json.is_object() || found == json.end()) return nullptr;
  return dot == std::string::npos ? &*found : value_at(*found, path.substr(dot + 1));
}

Json* value_at(Json& json, const std::string& path) { return const_cast<Json*>(value_at(std::as_const(json), path)); }

const std::string* find_ignoring_case(const std::string& text, const std::vector<std::string>& choices) {
  const auto found = std::find_if(choices.begin(), choices.end(),
                                  [&](const auto& choice) { return lower_case(choice) == lower_case(text); });
  return found == choices.end() ? nullptr : &*found;
}

Document::Document(Json json, std::string origin, std::map<std::string, std::string> names,
                   std::map<std::string, ConfigPlace> places)
    : json_(std::move(json)), origin_(std::move(origin)), names_(std::move(names)), places_(std::move(places)) {
  if (json_.is_null()) json_ = Json::object();
  if (!json_.is_object())
    refuse("", str("the whole file is ", excerpt(json_.dump(), 100), "; expected an object { … }"));
}

const Json* Document::find(const std::string& path) const {
  const Json* value = value_at(json_, path);
  return !value || value->is_null() || (value->is_string() && *value == "auto") ? nullptr : value;
}

bool Document::is_auto(const std::string& path) const {
  const Json* value = value_at(json_, path);
  return value && *value == "auto";
}

bool Document::flag_or(const std::string& path, bool fallback, const char* expected) const {
  const Json* json = find(path);
  if (!json) return fallback;
  if (*json == 0 || *json == 1) return *json == 1;  // as DeepSpeed reads them
  if (!json->is_boolean()) fail(path, expected);
  return json->get<bool>();
}

int64_t Document::integer_or(const std::string& path, int64_t fallback, const IntegerRange& range) const {
  const Json* json = find(path);
  if (!json) return fallback;
  int64_t result = 0;
  if (!to_integer(*json, result) || result < range.min || result > range.max) fail(path, range.words);
  return result;
}

double Document::number_or(const std::string& path, double fallback, const NumberRange& range) const {
  const Json* json = find(path);
  if (!json) return fallback;
  if (!json->is_number()) fail(path, range.words);
  const double result = json->get<double>();
  if (!(result >= range.min && result <= range.max)) fail(path, range.words);
  return result;
}

std::string Document::choice_or(const std::string& path, const std::string& fallback,
                                const std::vector<std::string>& choices) const {
  const Json* json = find(path);
  if (!json) return fallback;
  if (!json->is_string()) fail(path, one_of(choices));
  const auto& text = json->get_ref<const std::string&>();
  if (const std::string* choice = find_ignoring_case(text, choices)) return *choice;
  fail(path, one_of(choices) + "." + did_you_mean(text, choices));
}

std::string Document::text_or(const std::string& path, const std::string& fallback) const {
  const Json* json = find(path);
  if (!json) return fallback;
  if (!json->is_string()) fail(path, "a string");
  return json->get<std::string>();
}

std::vector<std::string> Document::texts_or(const std::string& path, const std::vector<std::string>& fallback) const {
  const Json* json = find(path);
  if (!json) return fallback;
  const bool strings =
      json->is_array() && std::all_of(json->begin(), json->end(), [](const Json& item) { return item.is_string(); });
  if (!strings) fail(path, "a list of strings");
  return json->get<std::vector<std::string>>();
}

void Document::rename(const std::string& name, const std::string& path) {
  const Json* value = value_at(json_, name);
  if (!value) return;
  Json moved = *value;
  const size_t dot = name.rfind('.');
  Json& section = dot == std::string::npos ? json_ : *value_at(json_, name.substr(0, dot));
  section.erase(name.substr(dot + 1));  // also where it is refused: it is no unknown key then
  if (value_at(json_, path))
    refuse(name, str("`", path_of(name), "` and `", path_of(path), "` are two spellings of one key; keep `",
                     path_of(path), "`"));
  section[path.substr(path.rfind('.') + 1)] = std::move(moved);
  names_[path] = name;
}

void Document::replace(const std::string& path, Json value) {
  const size_t dot = path.rfind('.');
  (dot == std::string::npos ? json_ : *value_at(json_, path.substr(0, dot)))[path.substr(dot + 1)] = std::move(value);
}

std::string Document::path_of(const std::string& path) const {
  for (std::string section = path; !section.empty();) {
    const auto named = names_.find(section);
    if (named != names_.end()) return named->second + path.substr(section.size());
    const size_t dot = section.rfind('.');
    section.resize(dot == std::string::npos ? 0 : dot);
  }
  return path;
}

void Document::fail(const std::string& path, const std::string& expected) const {
  const Json& json = *value_at(json_, path);
  const auto expects = [&](const char* word) { return expected.find(word) != std::string::npos; };
  const bool in_quotes = ((expects("number") || expects("integer")) && is_number_in_quotes(json)) ||
                         (expects("true") && (json == "true" || json == "false"));
  const char* fix = in_quotes ? "; write it without quotes" : "";
  refuse(path, str("`", path_of(path), "` is ", show(json), "; expected ", expected, fix));
}

void Document::not_there_yet(const std::string& path, const std::string& fix) const {
  const Json* json = value_at(json_, path);
  refuse(path, str("`", path_of(path), "` = ", json ? show(*json) : "null", " is not there yet; ", fix),
         ErrorCode::kUnsupported);
}

void Document::refuse(const std::string& path, const std::string& message, ErrorCode code) const {
  std::string section = path;
  while (!section.empty() && !places_.contains(section))
    section.resize(section.find('.') == std::string::npos ? 0 : section.rfind('.'));
  const ConfigPlace place = section.empty() ? ConfigPlace{} : places_.at(section);
  throw KeyError((place.file.empty() ? origin_ : place.file) + ": " + message, code, path_of(path), place);
}

bool Document::is_mistaken(const std::vector<std::string>& paths) const {
  return std::any_of(mistakes_.begin(), mistakes_.end(), [&](const KeyError& mistake) {
    return std::any_of(paths.begin(), paths.end(), [&](const std::string& path) {
      return is_inside(mistake.key(), path_of(path)) || is_inside(path_of(path), mistake.key());
    });
  });
}

ConfigMistake mistake_of(const KeyError& error, const std::map<std::string, int>& lines) {
  if (!error.place().file.empty())
    return {.message = error.what(), .code = error.code(), .line = error.place().line, .file = error.place().file};
  std::string key = error.key();
  while (!key.empty() && !lines.contains(key)) key.resize(key.find('.') == std::string::npos ? 0 : key.rfind('.'));
  return {.message = error.what(), .code = error.code(), .line = key.empty() ? 0 : lines.at(key)};
}

}  // namespace trireme
