// The slices of a model whose program has cut its layers itself, over the axis "model".
#pragma once

#include "training/module_tensors.h"
#include "trireme/tensor/partition.h"
#include "trireme/training/groups.h"
#include "trireme/training/options.h"

namespace trireme {

/// A plan that says of each of `tensors`, and behind them of each of `options.copies`, whether the ranks of
/// `groups.slices` have slices of it (TrainingOptions::own_slices) or all of it: these are parts of a tensor with one
/// more dim, the axis, so that a checkpoint keeps them apart and loads at as many ranks alone. Changes nothing.
/// Collective over `groups.model`.
///
/// Throws    ConfigError on every rank: `own_slices` is missing, names no parameter, or differs; a parameter that it
///           does not name, or a buffer, has other values on another rank; zero::Init has sharded a parameter.
PartitionPlan plan_of_program(const TrainingGroups& groups, const ModuleTensors& tensors,
                              const TrainingOptions& options);

}  // namespace trireme
