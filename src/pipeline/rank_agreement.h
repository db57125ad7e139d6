// Ranks that compare what each of them is about to run, before anything has changed.
#pragma once

#include <functional>
#include <string>

#include "trireme/comm/group.h"

namespace trireme {

/// Runs `text` on every rank and compares what it returns. Collective over `all`.
///
/// Cost      as first_different_line().
/// Throws    on every rank: what it threw on the lowest one, or ConfigError with the difference.
void agree(Group& all, const char* call, const std::function<std::string()>& text);

}  // namespace trireme
