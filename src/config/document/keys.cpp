#include "config/document/keys.h"

#include <map>
#include <utility>

#include "config/document/keys_text.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using Fate = KeyGroup::Fate;

const std::map<std::string, Fate> kFates = {{"no meaning", Fate::kNoMeaning},
                                            {"refused", Fate::kRefused},
                                            {"switched", Fate::kSwitched},
                                            {"open", Fate::kOpen},
                                            {"maps", Fate::kMaps},
                                            {"code", Fate::kCode}};

const Json& json() {
  static const Json read = Json::parse(kKeysText);
  return read;
}

KeyGroup group_of(const Json& json) {
  const auto text = [&](const char* key, const char* normal) { return json.value<std::string>(key, normal); };
  return {.section = text("section", ""),
          .fate = kFates.at(json.at("effect")),
          .doc = text("doc", ""),
          .fix = text("fix", ""),
          .types = json.value("types", std::vector<std::string>()),
          .topic = text("topic", ""),
          .values = json.value("values", Json()),
          .keys = json.at("keys"),
          .usual = json.value("usual", Json::object()),
          .pairs = value_pairs(json.value("pairs", Json::array())),
          .is_written = json.value("is written", false),
          .not_yet = json.value("not yet", Json::array())};
}

struct File {
  std::map<std::string, std::vector<KeyGroup>> groups;
  std::vector<Alias> aliases;
};

const File& file() {
  static const File read = [] {
    File all;
    for (const auto& place : json().at("places").items())
      for (const Json& group : place.value()) all.groups[place.key()].push_back(group_of(group));
    for (const Json& alias : json().at("other names"))
      all.aliases.push_back({alias.at("name"), alias.at("of"), alias.value("deprecated", false)});
    return all;
  }();
  return read;
}

}  // namespace

const std::vector<KeyGroup>& key_groups(const std::string& place) { return file().groups.at(place); }

std::vector<ValuePair> value_pairs(const Json& pairs) {
  std::vector<ValuePair> all;
  for (const Json& one : pairs) {
    if (one.is_array()) {
      all.emplace_back(one.at(0), one.at(1));
      continue;
    }
    for (const Json& named : json().at("value pairs").at(one.get<std::string>()))
      all.emplace_back(named.at(0), named.at(1));
  }
  return all;
}

const std::vector<Alias>& aliases() { return file().aliases; }

}  // namespace trireme
