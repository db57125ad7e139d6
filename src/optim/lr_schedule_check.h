// The reasons for which a schedule is refused.
#pragma once

#include <cstddef>

#include "trireme/optim/lr_schedule.h"

namespace trireme {

/// Throws    ConfigError: a parameter of `options` out of its range, or not one value for each of `groups`.
void check_schedule(const LrScheduleOptions& options, size_t groups);

}  // namespace trireme
