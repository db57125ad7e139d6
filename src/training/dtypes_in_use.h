// One line that says in which dtypes an engine keeps, sums and sends what it has.
#pragma once

#include <string>

#include "trireme/config/config.h"
#include "trireme/pager/pager.h"
#include "trireme/step/train_step.h"

namespace trireme {

std::string dtypes_in_use(const Config& config, const Pager& pager, const Buffers& buffers, TrainStep& step);

}  // namespace trireme
