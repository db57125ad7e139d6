#include "config/read_type.h"

#include "trireme/base/suggest.h"

namespace trireme {

std::string read_type(Section& section, const TypeNames& names) {
  std::vector<std::string> all = names.supported;
  all.insert(all.end(), names.not_there_yet.begin(), names.not_there_yet.end());
  std::string list;
  for (const std::string& name : names.supported) list += (list.empty() ? "" : ", ") + name;
  if (!section.has("type"))
    section.refuse(str("`", section.path_of("type"), "` is missing; it is one of ", list, names.others));
  const std::string given = section.text_or("type", "");
  const std::string* type = find_ignoring_case(given, all);
  if (!type) section.fail("type", str("one of ", list, names.others, ".", did_you_mean(given, all)));
  if (!find_ignoring_case(*type, names.supported))
    section.not_there_yet("type", str(names.instead, "use one of ", list));
  return *type;
}

}  // namespace trireme
