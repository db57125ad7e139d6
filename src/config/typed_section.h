// `optimizer` and `scheduler`: sections whose `type` decides which params there are.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "config/document/option.h"

namespace trireme {

struct TypeNames {
  std::vector<std::string> supported = {};
  std::vector<std::string> not_there_yet = {};  ///< refused as that (kUnsupported)
  std::string others = {};                      ///< ends the list of the supported: ", or in Python …"
  std::string instead = {};                     ///< opens the fix for those of `not_there_yet`: "… makes it; in C++ "
};

/// The type that `section` names, one of `names` in any case. Nothing where the section is absent, or where the type is
/// a mistake: then nothing inside of it is checked.
std::optional<std::string> read_type(Document& file, const std::string& section, const TypeNames& names,
                                     std::vector<KnownKey>& known);

template <class Owner>
std::vector<Option<Owner>> rows_of(const std::vector<Option<Owner>>& rows, const std::string& type) {
  std::vector<Option<Owner>> own;
  for (const auto& row : rows)
    if (row.types.empty() || std::find(row.types.begin(), row.types.end(), type) != row.types.end()) own.push_back(row);
  return own;
}

template <class Owner>
Json typed_json(const std::string& section, const std::vector<Option<Owner>>& rows, const std::string& type,
                const Owner& owner) {
  Json json = {{section, {{"type", type}, {"params", Json::object()}}}};
  write_rows(rows_of(rows, type), owner, json);
  return json[section];
}

}  // namespace trireme
