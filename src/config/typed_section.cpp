#include "config/typed_section.h"

#include "trireme/base/suggest.h"

namespace trireme {

std::optional<std::string> read_type(Document& file, const std::string& section, const TypeNames& names,
                                     std::vector<KnownKey>& known) {
  const std::string key = section + ".type";
  std::optional<std::string> type;
  file.attempt([&] {
    if (!file.has(section)) return;
    if (!file.find(section)->is_object()) file.fail(section, "an object { … }");
    std::vector<std::string> all = names.supported;
    all.insert(all.end(), names.not_there_yet.begin(), names.not_there_yet.end());
    std::string list;
    for (const std::string& name : names.supported) list += (list.empty() ? "" : ", ") + name;
    if (!file.has(key))
      file.refuse(key, str("`", file.path_of(key), "` is missing; it is one of ", list, names.others));
    const std::string given = file.text_or(key, "");
    const std::string* found = find_ignoring_case(given, all);
    if (!found) file.fail(key, str("one of ", list, names.others, ".", did_you_mean(given, all)));
    if (!find_ignoring_case(*found, names.supported)) file.not_there_yet(key, str(names.instead, "use one of ", list));
    type = *found;
  });
  if (!type) return std::nullopt;
  std::erase_if(known, [&](const KnownKey& one) { return one.path == section; });
  known.push_back({key});
  return type;
}

}  // namespace trireme
