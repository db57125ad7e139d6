// Whether a stage sums the whole gradients of a step's micro-batches before it reduces them.
#pragma once

#include "trireme/comm/group.h"
#include "trireme/training/training.h"

namespace trireme {

/// As PipelineConfig::whole_gradients says; "auto": where they fit into the memory of every rank that shares this
/// stage. Collective over the ranks of `training`.
bool sums_whole_gradients(Training& training, const Group& world);

}  // namespace trireme
