// The `type` of an optimizer or a scheduler.
#pragma once

#include <string>
#include <vector>

#include "config/section.h"

namespace trireme {

struct TypeNames {
  std::vector<std::string> supported;
  std::vector<std::string> not_there_yet;  ///< refused as that (kUnsupported)
  std::string others = {};                 ///< ends the list of the supported: ", or in Python …"
  std::string instead = {};                ///< opens the fix for those of `not_there_yet`: "… makes it; in C++ "
};

/// Reads `type`, one of `names` in any case; another name is refused as unknown.
std::string read_type(Section& section, const TypeNames& names);

}  // namespace trireme
