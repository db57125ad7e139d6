// The keys' part of docs/config.md.
#include "trireme/config/source.h"

#include "config/document/keys.h"
#include "config/options.h"

namespace trireme {
namespace {

/// The page's words for a row's effect, before the row's own line.
const char* words_of(Effect effect) {
  switch (effect) {
    case Effect::kWorks:
      return "";
    case Effect::kNoMeaning:
      return "no meaning: ";
    case Effect::kRefused:
      return "refused unless it has its default";
    case Effect::kChecked:
      return "";
  }
  return "";
}

template <class Owner>
std::string remark(const Option<Owner>& row) {
  const bool both = row.effect == Effect::kRefused && !row.doc.empty();
  return str(words_of(row.effect), both ? ": " : "", row.doc);
}

/// Neighbours with the same remark share a line, but for keys that work.
template <class Owner>
bool share_a_line(const Option<Owner>& one, const Option<Owner>& other) {
  return one.effect != Effect::kWorks && one.effect == other.effect && one.doc == other.doc && one.types == other.types;
}

template <class Owner>
std::string table(const std::vector<Option<Owner>>& rows, const std::string& section) {
  const bool has_types = section.ends_with(".params");
  std::string text = str("\n| key | values | default |", has_types ? " of |" : "", " |\n|---|---|---|",
                         has_types ? "---|" : "", "---|\n");
  for (size_t i = 0; i < rows.size();) {
    const Option<Owner>& first = rows[i];
    std::vector<std::string> keys, types, defaults;
    for (; i < rows.size() && (keys.empty() || share_a_line(first, rows[i])); ++i) {
      keys.push_back(str("`", rows[i].path.substr(section.empty() ? 0 : section.size() + 1), "`"));
      add_once(types, rows[i].type);
      add_once(defaults, rows[i].standard);
    }
    text += str("| ", joined_or_dash(keys), " | ", joined_or_dash(types), " | ", joined_or_dash(defaults),
                has_types ? " | " : "",
                !has_types            ? ""
                : first.types.empty() ? "all"
                                      : joined_or_dash(first.types),
                " | ", remark(first), " |\n");
  }
  return text;
}

std::string section_of(const std::string& path) {
  const size_t dot = path.find('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

}  // namespace

std::string keys_page() {
  std::vector<std::string> sections = {""};
  std::map<std::string, std::vector<Option<Config>>> rows;
  for (const Option<Config>& row : options()) {
    const std::string section = section_of(row.path);
    if (!rows.contains(section) && !section.empty()) sections.push_back(section);
    rows[section].push_back(row);
  }
  std::string text;
  for (const std::string& section : sections) {
    text += section.empty() ? "### Top level\n" : str("\n### `", section, "`\n");
    text += table(rows[section], section);
  }
  text += "\n### `optimizer.params`\n" + table(optimizer_options(), "optimizer.params");
  text += "\n### `scheduler.params`\n" + table(scheduler_options(), "scheduler.params");
  text += "\n### Other names\n\n| name | of |\n|---|---|\n";
  for (const Alias& alias : aliases())
    text +=
        str("| `", alias.name, "` | `", alias.path, "`", alias.is_deprecated ? "; deprecated, warned of" : "", " |\n");
  return text;
}

}  // namespace trireme
