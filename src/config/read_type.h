// The `type` of an optimizer or a scheduler.
#pragma once

#include <string>
#include <vector>

#include "config/section.h"

namespace trireme {

/// Reads `type`, one of `supported` in any case; a name of `not_there_yet` is refused as that (kUnsupported), another
/// one as unknown.
std::string read_type(Section& section, const std::vector<std::string>& supported,
                      const std::vector<std::string>& not_there_yet);

}  // namespace trireme
