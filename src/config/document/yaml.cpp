#include "config/document/yaml.h"

#include <yaml-cpp/yaml.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"

namespace trireme {
namespace {

constexpr int kMaxLevels = 100;  // an alias may stand inside of its own anchor

class Reader {
 public:
  explicit Reader(const std::string& origin) : origin_(origin) {}

  Json value(const YAML::Node& node, const std::string& path, int level) {
    if (level > kMaxLevels) fail(node.Mark(), str("nested deeper than ", kMaxLevels, " levels"));
    if (node.IsMap()) return map(node, path, level);
    if (node.IsSequence()) {
      Json list = Json::array();
      for (const YAML::Node& item : node) list.push_back(value(item, path + "[]", level + 1));
      return list;
    }
    return node.IsNull() || !node.IsDefined() ? Json() : scalar(node);
  }

  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& reason) const {
    throw ConfigError(str(origin_, ":", mark.line + 1, ":", mark.column + 1, ": ", reason));
  }

  std::map<std::string, int> lines;

 private:
  Json map(const YAML::Node& node, const std::string& path, int level) {
    Json object = Json::object();
    for (const auto& item : node) {
      if (!item.first.IsScalar()) fail(item.first.Mark(), "expected a text as key");
      const std::string& key = item.first.Scalar();
      const std::string inner = path.empty() ? key : path + "." + key;
      if (object.contains(key))
        fail(item.first.Mark(), str("the key `", inner, "` stands twice; remove one of the two"));
      lines.emplace(inner, item.first.Mark().line + 1);
      object[key] = value(item.second, inner, level + 1);
    }
    return object;
  }

  static Json scalar(const YAML::Node& node) {
    const std::string& text = node.Scalar();
    constexpr double infinity = std::numeric_limits<double>::infinity();
    if (node.Tag() == "!") return text;  // in quotes
    if (bool flag = false; text.size() > 1 && YAML::convert<bool>::decode(node, flag)) return flag;
    if (text == ".inf" || text == "-.inf") return text[0] == '-' ? -infinity : infinity;
    Json number = Json::parse(text, nullptr, false);
    return number.is_number() ? number : Json(text);
  }

  const std::string& origin_;
};

void emit(const Json& json, YAML::Emitter& out) {
  if (json.is_object()) {
    out << YAML::BeginMap;
    for (const auto& item : json.items()) {
      out << YAML::Key << item.key() << YAML::Value;
      emit(item.value(), out);
    }
    out << YAML::EndMap;
  } else if (json.is_string()) {
    const auto text = json.get<std::string>();
    // YAML 1.1 takes a plain `no` for false.
    if (bool flag = false; YAML::convert<bool>::decode(YAML::Node(text), flag)) out << YAML::DoubleQuoted;
    out << text;
  } else {
    out << json.dump();
  }
}

}  // namespace

YamlText parse_yaml(const std::string& text, const std::string& origin) {
  Reader reader(origin);
  try {
    Json json = reader.value(YAML::Load(text), "", 0);
    return {.json = std::move(json), .lines = std::move(reader.lines)};
  } catch (const YAML::Exception& error) {
    reader.fail(error.mark, error.msg);
  }
}

std::string to_yaml(const Json& json) {
  YAML::Emitter out;
  emit(json, out);
  return std::string(out.c_str()) + "\n";
}

}  // namespace trireme
