// The table that an engine logs at its start: in which dtypes it loads, keeps, computes, sums and updates, and how many
// bytes that is on one rank.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "trireme/config/config.h"
#include "trireme/pager/pager.h"
#include "trireme/step/train_step.h"

namespace trireme {

using DtypeBytes = std::map<at::ScalarType, int64_t>;

DtypeBytes bytes_by_dtype(const std::vector<NamedParameter>& parameters);

/// Logs the table, and a warning where parameters that came in 16 bits get fp32 masters: what these cost. `loaded` are
/// the parameters as the program gave them. Without an optimizer the table ends with the preparation.
void log_precision(const DtypeBytes& loaded, const Config& config, const Pager& pager, const Buffers& buffers,
                   TrainStep& step);

}  // namespace trireme
