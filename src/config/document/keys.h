// Keys that need no code of their own: keys.json says what becomes of each, and the build embeds it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/document/option.h"

namespace trireme {

/// A value of another dialect, and the one here; null: it changes nothing.
using ValuePair = std::pair<Json, Json>;
/// Those of a name, or of several: an array of pairs and names.
std::vector<ValuePair> value_pairs(const Json& pairs);

/// Neighbours in the table of options with the same fate.
struct KeyGroup {
  enum class Fate {
    kNoMeaning,
    kRefused,
    kSwitched,  ///< of a section that is off unless the first key differs from its default
    kOpen,      ///< sections whose keys are not checked
    kMaps,      ///< of another dialect: stands for a key here
    kCode,      ///< of another dialect: its row is made by code
  };
  std::string section;  ///< "" at the top level
  Fate fate = Fate::kNoMeaning;
  std::string doc;
  std::string fix;                 ///< before "remove it or set it to …"
  std::vector<std::string> types;  ///< of optimizers, where the keys are theirs
  std::string topic;               ///< of Accelerate's keys: the line of their table
  Json values;                     ///< of Accelerate's keys: which are valid, where the default does not say it
  Json keys;                       ///< with their defaults; of kMaps: with the keys here, or null
  Json usual;                      ///< of keys without a meaning: values beside the default that templates have
  std::vector<ValuePair> pairs;    ///< of kMaps: values there and here; none: they are the same
  bool is_written = false;         ///< of kMaps: in a file of the dialect too, where others say the same
  Json not_yet;                    ///< values that are refused, with `fix`

  std::string path_of(const std::string& key) const { return section.empty() ? key : section + "." + key; }
};

/// The groups that stand under `place` in keys.json, in its order. Throws std::out_of_range: there are none.
const std::vector<KeyGroup>& key_groups(const std::string& place);

/// A key that is called otherwise in some files.
struct Alias {
  std::string name;
  std::string path;
  bool is_deprecated = false;
};
const std::vector<Alias>& aliases();

/// The row of one of the group's keys; not for kOpen, kMaps and kCode.
template <class Owner>
Option<Owner> row_of(const KeyGroup& group, const std::string& key) {
  const std::string path = group.path_of(key);
  const Json& normal = group.keys.at(key);
  const auto make = [&] {
    if (group.fate == KeyGroup::Fate::kNoMeaning)
      return no_meaning<Owner>(path, normal, group.doc, group.usual.value(key, Json::array()));
    const bool is_switch = key == group.keys.begin().key();
    if (group.fate == KeyGroup::Fate::kSwitched && !is_switch) return checked<Owner>(path, normal);
    return refused<Owner>(path, normal, group.doc, group.fix);
  };
  Option<Owner> row = make();
  row.types = group.types;
  return row;
}

}  // namespace trireme
