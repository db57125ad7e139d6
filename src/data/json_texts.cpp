#include "data/json_texts.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/utf8.h"

namespace trireme {
namespace {

constexpr std::string_view kBlanks = " \t\r\n";
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

bool is_blank(std::string_view line) { return line.find_first_not_of(kBlanks) == line.npos; }

std::string_view first_line(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  return text.substr(0, text.find('\n'));
}

bool is_json(std::string_view text) { return nlohmann::json::accept(text.begin(), text.end()); }

std::string_view without_mark(std::string_view text) {
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  return text;
}

// A record on each line: the first line is whole. `{` alone opens a file that is one value.
bool has_records_on_lines(std::string_view file) {
  const std::string_view line = first_line(file);
  return line.starts_with("{") && is_json(line);
}

std::string listed(const Json& record) {
  constexpr size_t kMostShown = 20;
  std::string names;
  size_t shown = 0;
  for (const auto& [name, value] : record.items()) {
    if (++shown > kMostShown) return names + ", …";
    names += str(names.empty() ? "`" : ", `", name.substr(0, 80), "`");
  }
  return names;
}

class Reader {
 public:
  Reader(const std::string& path, const std::string& key) : path_(path), key_(key) {}

  void read_lines(std::string_view file) {
    for (size_t line = 1; !file.empty(); ++line) {
      const size_t end = std::min(file.find('\n'), file.size());
      const std::string place = str(path_, ", line ", line);
      if (const auto text = file.substr(0, end); !is_blank(text)) take(parsed(text, place), place);
      file.remove_prefix(std::min(end + 1, file.size()));
    }
  }

  void read_whole(std::string_view file) {
    const Json value = parsed(file, path_);
    if (!value.is_array()) return take(value, path_);
    for (size_t i = 0; i < value.size(); ++i) take(value[i], str(path_, "[", i, "]"));
  }

  std::string texts() { return std::move(texts_); }

 private:
  // The library's text without the line of the file that it shows: that may be a whole document.
  static Json parsed(std::string_view text, const std::string& place) {
    try {
      return parse_json(text, place);
    } catch (const ConfigError& error) {
      const std::string message = error.what();
      constexpr size_t kMostShown = 250;  // the parser repeats what it has read, perhaps a whole document
      throw DataError(str(excerpt(message.substr(0, message.find('\n')), kMostShown),
                          "; mend it, or set the data format (--data-format bytes) to train on the file as it is"));
    }
  }

  void take(const Json& record, const std::string& place) {
    if (!record.is_object())
      throw DataError(str(place, ": this is ", article(record), "; expected a record, {…}, with the key `", key_, "`"));
    const auto found = record.find(key_);
    if (found == record.end())
      throw DataError(str(place, ": there is no key `", key_, "`; ",
                          record.empty() ? "the record is empty"
                                         : str("its keys are ", listed(record),
                                               ": name the one whose texts are to be "
                                               "trained on by --text-key")));
    if (!found->is_string())
      throw DataError(str(place, ": `", key_, "` is ", article(*found), ", not a text; its keys are ", listed(record),
                          ": name one whose values are texts by --text-key, or write such a key"));
    const auto& text = found->get_ref<const std::string&>();
    if (text.find('\0') != text.npos)
      throw DataError(str(place, ": `", key_, "` has the character \\u0000, which ends documents here; take it out"));
    if (text.empty()) return;
    if (!texts_.empty()) texts_ += '\0';
    texts_ += text;
  }

  static std::string article(const Json& value) {
    const std::string name = value.type_name();
    return value.is_null() ? name : str(name.starts_with("a") || name.starts_with("o") ? "an " : "a ", name);
  }

  const std::string& path_;
  const std::string& key_;
  std::string texts_;
};

}  // namespace

bool looks_like_json(std::string_view file) {
  file = without_mark(file);
  const std::string_view line = first_line(file);
  if (!line.starts_with("{") && !line.starts_with("[")) return false;
  return has_records_on_lines(file) || is_json(file);
}

std::string json_texts(std::string_view file, const std::string& path, const std::string& key) {
  file = without_mark(file);
  Reader reader(path, key);
  const bool is_whole = !has_records_on_lines(file) && (path.ends_with(".json") || is_json(file));
  is_whole ? reader.read_whole(file) : reader.read_lines(file);
  return reader.texts();
}

}  // namespace trireme
