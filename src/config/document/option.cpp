#include "config/document/option.h"

#include <algorithm>
#include <map>

#include "trireme/base/suggest.h"
#include "trireme/base/words.h"

namespace trireme {
namespace {

/// Names of keys in other libraries, where no edit leads from one name to the other.
std::string name_here(const std::string& key) {
  static const std::map<std::string, std::string> names = {
      {"learning_rate", "lr"},
      {"batch_size", "train_batch_size"},
      {"max_grad_norm", "gradient_clipping"},
      {"micro_batch_size", "train_micro_batch_size_per_gpu"},
      {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
      {"warmup_steps", "warmup_num_steps"}};
  const auto found = names.find(key);
  return found == names.end() ? key : found->second;
}

std::vector<std::string> alternatives(const std::string& text) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == '|') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

NumberRange range_for(const Json& normal) {
  return normal < 0 ? NumberRange{} : NumberRange{.min = 0, .words = "a number >= 0"};
}

/// The keys that may stand in the section `prefix` ("" or "a.b.").
std::vector<std::string> keys_in(const std::vector<KnownKey>& known, const std::string& prefix) {
  std::vector<std::string> keys;
  for (const KnownKey& key : known)
    if (key.path.starts_with(prefix) && key.path != prefix)
      keys.push_back(key.path.substr(prefix.size(), key.path.find('.', prefix.size()) - prefix.size()));
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

/// Where a key that is unknown in its section stands elsewhere: " Did you mean `zero_optimization.stage`?"
std::string in_another_section(const std::string& name, const std::vector<KnownKey>& known) {
  for (const KnownKey& key : known)
    if (key.path.ends_with("." + name)) return str(" Did you mean `", key.path, "`?");
  return "";
}

void refuse_unknown_keys(const Json& object, const std::string& prefix, const std::vector<KnownKey>& known,
                         Document& file) {
  const std::vector<std::string> keys = keys_in(known, prefix);
  for (const auto& item : object.items()) {
    const std::string path = prefix + item.key();
    const auto is_row = [&](const KnownKey& key) { return key.path == path; };
    const auto row = std::find_if(known.begin(), known.end(), is_row);
    const bool is_section =
        std::any_of(known.begin(), known.end(), [&](const KnownKey& key) { return key.path.starts_with(path + "."); });
    if (row != known.end() && (row->is_open || !is_section)) continue;
    file.attempt([&] {
      if (!is_section) {
        const std::string name = name_here(item.key());
        std::string hint = did_you_mean(name, keys);
        if (hint.empty()) hint = in_another_section(name, known);
        file.refuse(path, str("unknown key `", file.path_of(path), "`.",
                              hint.empty() ? " Remove it; `trireme docs config` lists all keys." : hint));
      }
      if (item.value().is_object()) return refuse_unknown_keys(item.value(), path + ".", known, file);
      if (row == known.end() && file.has(path)) file.fail(path, "an object { … }");
    });
  }
}

}  // namespace

ValueType<bool> flag() {
  return {.words = "true or false",
          .read = [](const Document& file, const std::string& path) { return file.flag_or(path, false); }};
}

ValueType<bool> flag_or_auto() {
  return {.words = "true, false or `\"auto\"`", .read = [](const Document& file, const std::string& path) {
            return file.flag_or(path, false, "true, false or \"auto\"");
          }};
}

ValueType<int64_t> integer(const IntegerRange& range) {
  return {.words = range.words,
          .read = [range](const Document& file, const std::string& path) { return file.integer_or(path, 0, range); }};
}

ValueType<double> number(const NumberRange& range) {
  return {.words = range.words,
          .read = [range](const Document& file, const std::string& path) { return file.number_or(path, 0, range); }};
}

ValueType<std::string> text() {
  return {.words = "a string",
          .read = [](const Document& file, const std::string& path) { return file.text_or(path, ""); }};
}

ValueType<std::vector<std::string>> texts() {
  return {.words = "a list of strings",
          .read = [](const Document& file, const std::string& path) { return file.texts_or(path, {}); }};
}

ValueType<std::vector<std::string>> text_or_texts() {
  return {.words = "a string, or a list of strings", .read = [](const Document& file, const std::string& path) {
            const Json* json = file.find(path);
            return json && json->is_string() ? std::vector{json->get<std::string>()} : file.texts_or(path, {});
          }};
}

std::string shown(const std::optional<Json>& value) { return value ? str("`", value->dump(), "`") : "–"; }

bool differs(const Document& file, const std::string& path, const Json& normal) {
  if (normal.is_boolean()) return file.flag_or(path, normal) != normal.get<bool>();
  if (normal.is_number()) return file.number_or(path, normal, range_for(normal)) != normal.get<double>();
  if (normal.is_array()) return file.texts_or(path, normal) != normal.get<std::vector<std::string>>();
  if (!normal.is_string()) return file.has(path);
  const auto choices = alternatives(normal);
  const std::string text =
      choices.size() == 1 ? file.text_or(path, choices[0]) : file.choice_or(path, choices[0], choices);
  return text != choices[0];
}

bool is_one_of(const Json& values, const Json& value) {
  return std::any_of(values.begin(), values.end(), [&](const Json& one) { return one == value; });
}

std::string words_for(const Json& normal) {
  if (normal.is_boolean()) return "true or false";
  if (normal.is_number()) return range_for(normal).words;
  if (normal.is_array()) return "a list of strings";
  if (!normal.is_string()) return "anything";
  std::string words;
  for (const std::string& one : alternatives(normal)) words += (words.empty() ? "`\"" : ", `\"") + one + "\"`";
  return words.find(',') == std::string::npos ? "a string" : words;
}

std::string default_of(const Json& normal) {
  if (normal.is_null()) return shown(std::nullopt);
  return shown(std::optional<Json>(std::in_place, normal.is_string() ? Json(alternatives(normal)[0]) : normal));
}

std::string fix_for(const Json& normal) {
  return normal.is_null() ? "remove it" : str("remove it or set it to ", normal.dump());
}

void add_once(std::vector<std::string>& words, const std::string& word) {
  if (!word.empty() && std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
}

std::string joined_or_dash(const std::vector<std::string>& words, const char* between) {
  return words.empty() ? "–" : joined(words, between);
}

void put(Json& json, const std::string& path, Json value) {
  const size_t dot = path.find('.');
  if (dot == std::string::npos) {
    json[path] = std::move(value);
  } else {
    put(json[path.substr(0, dot)], path.substr(dot + 1), std::move(value));
  }
}

void refuse_unknown_keys(const std::vector<KnownKey>& known, Document& file) {
  refuse_unknown_keys(file.json(), "", known, file);
}

}  // namespace trireme
