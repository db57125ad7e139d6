// The slices of a model's parameters that a rank has where layers are cut over the axis "tensor".
#pragma once

#include <vector>

#include "training/module_tensors.h"
#include "trireme/tensor/partition.h"
#include "trireme/training/groups.h"
#include "trireme/training/options.h"

namespace trireme {

/// How `tensors` are cut over `groups.tensor`, which there is. Changes nothing. Collective over `groups.model`.
///
/// Throws    ConfigError on every rank: as make_partition_plan(); a parameter that zero::Init has sharded, or of which
///           two ranks share elements and differ in others; ranks with other facts of the model, or another tp_plan.
PartitionPlan plan_slices(const TrainingGroups& groups, const ModuleTensors& tensors, const TrainingOptions& options);

/// The values of `tensor`'s first rank become everybody's, and parameters that `plan` cuts this rank's slices: the same
/// tensor objects of another shape. One whole parameter at a time. Collective over `tensor`.
void cut_parameters(Group& tensor, const PartitionPlan& plan, std::vector<NamedParameter>& parameters);

}  // namespace trireme
