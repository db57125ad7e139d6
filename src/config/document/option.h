// A row of a table of options: one key of a file, what may stand there, and the member that it sets.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "config/document/document.h"

namespace trireme {

enum class Effect {
  kWorks,
  kNoMeaning,  ///< checked, and named in the info line unless it has its default; changes nothing
  kRefused,    ///< not there yet: refused unless it has its default
  kChecked,    ///< checked; its section's switch alone counts
};

/// `Owner` is the struct that the table's keys fill.
template <class Owner>
struct Option {
  std::string path;
  Effect effect = Effect::kWorks;
  std::string type;      ///< the values that may stand there, in words
  std::string standard;  ///< the default, as the page shows it
  std::string doc;       ///< one line
  /// Called for every row, whether its key is there or not. Throws ConfigError.
  std::function<void(Document&, Owner&)> read = {};
  /// The value as the file has it; nothing is left out. Empty: the key is never written.
  std::function<std::optional<Json>(const Owner&)> write = {};
  bool is_open = false;                 ///< the keys inside are not checked
  std::vector<std::string> types = {};  ///< of an optimizer or a scheduler, the types that have the key; none: all
};

// --- values --------------------------------------------------------------------------------------------------------

/// How a value of type T is read and written, and the words for it.
template <class T>
struct ValueType {
  std::string words;
  std::function<T(const Document&, const std::string& path)> read;
  std::function<Json(const T&)> write = [](const T& value) { return Json(value); };
};

ValueType<bool> flag();
/// For members where nothing stands for "auto", which reads as absent.
ValueType<bool> flag_or_auto();
ValueType<int64_t> integer(const IntegerRange& range);
ValueType<double> number(const NumberRange& range);
ValueType<std::string> text();
ValueType<std::vector<std::string>> texts();
/// One text may stand without its list.
ValueType<std::vector<std::string>> text_or_texts();

/// One of several names, in any case. The first name of a value is the one that is written.
template <class T>
ValueType<T> choice(std::vector<std::pair<std::string, T>> choices) {
  std::vector<std::string> names;
  std::string words;
  for (const auto& [name, value] : choices) {
    names.push_back(name);
    words += (words.empty() ? "`\"" : ", `\"") + name + "\"`";
  }
  return {.words = words,
          .read =
              [choices, names](const Document& file, const std::string& path) {
                const std::string name = file.choice_or(path, names[0], names);
                for (const auto& [other, value] : choices)
                  if (other == name) return value;
                return choices[0].second;
              },
          .write =
              [choices](const T& value) {
                for (const auto& [name, other] : choices)
                  if (other == value) return Json(name);
                return Json();
              }};
}

// --- rows ----------------------------------------------------------------------------------------------------------

/// at<&Config::pager, &PagerPolicy::stage>(config) is config.pager.stage.
template <auto... members>
inline constexpr auto at = [](auto& owner) -> auto& {
  return (owner.*....*members);
};

template <class T>
struct Unwrapped {
  using Type = T;
};
template <class T>
struct Unwrapped<std::optional<T>> {
  using Type = T;
};

/// The text of a default for the page.
std::string shown(const std::optional<Json>& value);

/// A key that sets a member.
template <class Owner, class T, class Member>
Option<Owner> works(const std::string& path, ValueType<T> type, Member member, const char* doc) {
  using Held = std::decay_t<decltype(member(std::declval<Owner&>()))>;
  using Inner = typename Unwrapped<Held>::Type;
  Option<Owner> row{.path = path, .type = type.words, .standard = {}, .doc = doc};
  row.read = [path = row.path, type, member](Document& file, Owner& owner) {
    if (file.has(path)) member(owner) = static_cast<Inner>(type.read(file, path));
  };
  row.write = [type, member](const Owner& owner) -> std::optional<Json> {
    if constexpr (std::is_same_v<Held, Inner>)
      return type.write(static_cast<T>(member(owner)));
    else
      return member(owner) ? std::optional(type.write(static_cast<T>(*member(owner)))) : std::nullopt;
  };
  row.standard = shown(row.write(Owner{}));
  return row;
}

/// A key that several members follow from, or a member that several keys decide: it is checked here, and
/// src/config/resolve.cpp acts on it. `get` gives the value to write; nullptr: it is never written.
template <class Owner, class T>
Option<Owner> resolved(const std::string& path, ValueType<T> type,
                       std::type_identity_t<std::function<T(const Owner&)>> get, std::string standard,
                       const char* doc) {
  Option<Owner> row{.path = path, .type = type.words, .standard = std::move(standard), .doc = doc};
  row.read = [path = row.path, type](Document& file, Owner&) {
    if (file.has(path)) (void)type.read(file, path);
  };
  if (get) row.write = [type, get](const Owner& owner) { return type.write(get(owner)); };
  return row;
}

/// Reads `path` as a value of the type of its default `normal`: a number must not be negative unless the default is;
/// "a|b" stands for a or b, with a the default; null for anything. Returns whether it differs from the default.
bool differs(const Document& file, const std::string& path, const Json& normal);
/// Whether `value` is among `values`, an array; numbers are compared as numbers.
bool is_one_of(const Json& values, const Json& value);
/// The type of `normal` in words, and its value as the page shows it.
std::string words_for(const Json& normal);
std::string default_of(const Json& normal);
/// "remove it or set it to false"
std::string fix_for(const Json& normal);

/// `usual`: values of templates that everybody copies; like the default, they are not named in the info line.
template <class Owner>
Option<Owner> no_meaning(const std::string& path, const Json& normal, const std::string& doc,
                         const Json& usual = Json::array()) {
  return {.path = path,
          .effect = Effect::kNoMeaning,
          .type = words_for(normal),
          .standard = default_of(normal),
          .doc = doc,
          .read = [=](Document& file, Owner&) {
            if (differs(file, path, normal) && !is_one_of(usual, *file.find(path)))
              file.without_meaning.push_back(file.path_of(path));
          }};
}

template <class Owner>
Option<Owner> refused(const std::string& path, const Json& normal, const std::string& doc = "",
                      const std::string& fix = "") {
  return {.path = path,
          .effect = Effect::kRefused,
          .type = words_for(normal),
          .standard = default_of(normal),
          .doc = doc,
          .read = [=](Document& file, Owner&) {
            if (differs(file, path, normal)) file.not_there_yet(path, fix + fix_for(normal));
          }};
}

template <class Owner>
Option<Owner> checked(const std::string& path, const Json& normal) {
  return {.path = path,
          .effect = Effect::kChecked,
          .type = words_for(normal),
          .standard = default_of(normal),
          .doc = "without effect while its section is off",
          .read = [=](Document& file, Owner&) { (void)differs(file, path, normal); }};
}

// --- pages ---------------------------------------------------------------------------------------------------------

void add_once(std::vector<std::string>& words, const std::string& word);
/// "a, b"; "–" for none.
std::string joined_or_dash(const std::vector<std::string>& words, const char* between = ", ");

// --- tables --------------------------------------------------------------------------------------------------------

/// Tries every row; what they throw are `file`'s mistakes.
template <class Owner>
void read_rows(const std::vector<Option<Owner>>& rows, Document& file, Owner& owner) {
  for (const auto& row : rows) file.attempt([&] { row.read(file, owner); });
}

/// Makes the sections that `path` goes through.
void put(Json& json, const std::string& path, Json value);

/// Puts the value of every row that has one at its path in `json`.
template <class Owner>
void write_rows(const std::vector<Option<Owner>>& rows, const Owner& owner, Json& json) {
  for (const auto& row : rows)
    if (const auto value = row.write ? row.write(owner) : std::nullopt) put(json, row.path, *value);
}
/// A key that a table knows.
struct KnownKey {
  std::string path;
  bool is_open = false;
};

template <class Owner>
void add_keys(const std::vector<Option<Owner>>& rows, std::vector<KnownKey>& keys) {
  for (const auto& row : rows) keys.push_back({row.path, row.is_open});
}

/// Every key of `file` that is none of `known`, and every section that is no object, becomes a mistake with the
/// nearest name.
void refuse_unknown_keys(const std::vector<KnownKey>& known, Document& file);

}  // namespace trireme
