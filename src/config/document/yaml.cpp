#include "config/document/yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cctype>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/utf8.h"

namespace trireme {
namespace {

/// Builds the value from the parser's events, so that no node is kept and every limit is met as it is passed.
class Builder final : public YAML::EventHandler {
 public:
  explicit Builder(const std::string& origin) : origin_(origin) {}

  YamlText take() { return {.json = std::move(root_), .lines = std::move(lines_)}; }

  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& reason) const {
    throw ConfigError(str(origin_, ":", mark.line + 1, ":", mark.column + 1, ": ", excerpt(reason)));
  }

  void OnDocumentStart(const YAML::Mark& /*mark*/) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { put(mark, anchor, Json()); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto named = anchors_.find(anchor);
    if (named == anchors_.end()) fail(mark, "an alias inside of its own anchor");
    if (levels_.size() + named->second.levels > kMostLevels) fail_too_deep(mark);
    count(mark, named->second.values);
    place(mark, named->second, YAML::NullAnchor);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    put(mark, anchor, awaits_key() || tag == "!" ? Json(value) : plain_scalar(value));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& /*tag*/, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value /*style*/) override {
    open(mark, anchor, Json::array());
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& /*tag*/, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value /*style*/) override {
    open(mark, anchor, Json::object());
  }
  void OnMapEnd() override { close(); }

 private:
  static constexpr size_t kMostLevels = 100;
  static constexpr size_t kMostValues = JsonLimits{}.values;  ///< those that aliases repeat included

  struct Level {
    YAML::Mark mark;
    YAML::anchor_t anchor;
    size_t values_before;  ///< it and what is in it came
    Json value;
    std::optional<std::string> path;       ///< nullopt: longer than kMostPathBytes
    std::optional<std::string> key;        ///< of a mapping: whose value comes next
    std::unordered_set<std::string> keys;  ///< of a mapping: Json itself would search linearly
    size_t levels = 1;                     ///< it and the deepest of what is in it
  };
  struct Anchored {
    Json json;
    size_t values;
    size_t levels;
  };

  bool awaits_key() const { return !levels_.empty() && levels_.back().value.is_object() && !levels_.back().key; }

  [[noreturn]] void fail_too_deep(const YAML::Mark& mark) const {
    fail(mark, str("nested deeper than ", kMostLevels, " levels"));
  }

  void count(const YAML::Mark& mark, size_t values) {
    if (values > kMostValues - values_)
      fail(mark, str("more than ", kMostValues, " values, those that aliases repeat included"));
    values_ += values;
  }

  /// Path of the value that comes next; nullopt: longer than kMostPathBytes.
  std::optional<std::string> path_here() const {
    if (levels_.empty()) return "";
    const Level& level = levels_.back();
    const std::string_view name = level.value.is_array() ? "[]" : std::string_view(*level.key);
    if (!level.path || level.path->size() + name.size() + 1 > kMostPathBytes) return std::nullopt;
    return str(*level.path, level.value.is_array() || level.path->empty() ? "" : ".", name);
  }

  void put(const YAML::Mark& mark, YAML::anchor_t anchor, Json json) {
    if (json.is_string() && !is_utf8(json.get_ref<const std::string&>()))
      fail(mark, "not UTF-8; save the file as UTF-8");
    if (!awaits_key()) count(mark, 1);
    place(mark, {std::move(json), 1, 0}, anchor);
  }

  void place(const YAML::Mark& mark, Anchored found, YAML::anchor_t anchor) {
    if (anchor != YAML::NullAnchor) anchors_[anchor] = found;
    if (levels_.empty()) {
      root_ = std::move(found.json);
      return;
    }
    Level& level = levels_.back();
    level.levels = std::max(level.levels, found.levels + 1);
    if (level.value.is_array()) return level.value.push_back(std::move(found.json));
    if (!level.key) return take_key(mark, std::move(found.json));
    level.value.get_ref<Json::object_t&>().emplace_back(*level.key, std::move(found.json));
    level.key.reset();
  }

  void take_key(const YAML::Mark& mark, Json key) {
    if (!key.is_string()) fail(mark, "expected a text as key");
    Level& level = levels_.back();
    level.key = key.get<std::string>();
    if (level.key->size() > JsonLimits{}.key_bytes)
      fail(mark, str("a key of ", level.key->size(), " bytes, at most ", JsonLimits{}.key_bytes, " are read"));
    const std::optional<std::string> path = path_here();
    if (!level.keys.insert(*level.key).second)
      fail(mark, str("the key `", path.value_or(*level.key), "` stands twice; remove one of the two"));
    if (path) lines_.emplace(*path, mark.line + 1);
  }

  void open(const YAML::Mark& mark, YAML::anchor_t anchor, Json value) {
    if (awaits_key()) fail(mark, "expected a text as key");
    if (levels_.size() >= kMostLevels) fail_too_deep(mark);
    const size_t before = values_;
    count(mark, 1);
    levels_.push_back({mark, anchor, before, std::move(value), path_here(), {}, {}});
  }

  void close() {
    Level level = std::move(levels_.back());
    levels_.pop_back();
    place(level.mark, {std::move(level.value), values_ - level.values_before, level.levels}, level.anchor);
  }

  static Json plain_scalar(const std::string& text) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    if (bool flag = false; text.size() > 1 && text.size() < 8 && YAML::convert<bool>::decode(YAML::Node(text), flag))
      return flag;
    if (text == ".inf" || text == "-.inf") return text[0] == '-' ? -infinity : infinity;
    const bool may_be_number = !text.empty() && (text[0] == '-' || std::isdigit(static_cast<unsigned char>(text[0])));
    Json number = may_be_number ? Json::parse(text, nullptr, false) : Json();
    return number.is_number() ? number : Json(text);
  }

  const std::string& origin_;
  Json root_;
  std::map<std::string, int> lines_;
  std::vector<Level> levels_;
  std::map<YAML::anchor_t, Anchored> anchors_;
  size_t values_ = 0;
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
  Builder builder(origin);
  try {
    std::istringstream stream(text);
    YAML::Parser(stream).HandleNextDocument(builder);
    return builder.take();
  } catch (const YAML::Exception& error) {
    builder.fail(error.mark, error.msg);
  }
}

std::string to_yaml(const Json& json) {
  YAML::Emitter out;
  emit(json, out);
  return std::string(out.c_str()) + "\n";
}

}  // namespace trireme
