// The passes that cut a model's activations.
#pragma once

#include <vector>

#include "trireme/config/config.h"
#include "trireme/pager/pager.h"
#include "trireme/tensor/partition.h"
#include "trireme/training/groups.h"
#include "trireme/training/operator_passes.h"
#include "trireme/training/options.h"

namespace trireme {

/// Over parts of sequences, where the plan has them.
std::vector<CuttingPass> passes_on_whole_layers(const TrainingGroups& groups, const Config& config);
/// Over slices of layers, `parameters` by `plan`. Where sequences are cut, too, it is one pass along both axes: a
/// tensor may be cut along each.
std::vector<CuttingPass> passes_on_slices(const TrainingGroups& groups, const Config& config,
                                          const TrainingOptions& options, const PartitionPlan& plan,
                                          const std::vector<NamedParameter>& parameters);

}  // namespace trireme
