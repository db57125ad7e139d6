#include "config/read_type.h"

#include "trireme/base/suggest.h"

namespace trireme {

std::string read_type(Section& section, const std::vector<std::string>& supported,
                      const std::vector<std::string>& not_there_yet) {
  std::vector<std::string> all = supported;
  all.insert(all.end(), not_there_yet.begin(), not_there_yet.end());
  std::string names;
  for (const std::string& name : supported) names += (names.empty() ? "" : ", ") + name;
  if (!section.has("type")) section.refuse(str("`", section.path_of("type"), "` is missing; it is one of ", names));
  const std::string given = section.text_or("type", "");
  const std::string* type = find_ignoring_case(given, all);
  if (!type) section.fail("type", "one of " + names + "." + did_you_mean(given, all));
  if (!find_ignoring_case(*type, supported)) section.not_there_yet("type", "use one of " + names);
  return *type;
}

}  // namespace trireme
