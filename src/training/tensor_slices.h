// The slices of a model's parameters that a rank has where layers are cut over the axis "tensor".
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "training/module_tensors.h"
#include "trireme/tensor/partition.h"
#include "trireme/tensor/tensor_parallel.h"
#include "trireme/training/groups.h"
#include "trireme/training/options.h"

namespace trireme {

/// How `tensors`, and behind them `options.copies` by name, are cut over the axis "tensor", which there is. Changes
/// nothing. Collective over `groups.model`.
///
/// Throws    ConfigError on every rank: as make_partition_plan(); ranks with other facts of the model, or another
///           tp_plan.
PartitionPlan plan_slices(const TrainingGroups& groups, const ModuleTensors& tensors, const Config& config,
                          const TrainingOptions& options);

/// The values of the first rank on "tensor" become everybody's, and parameters that `plan` cuts this rank's slices: the
/// same tensor objects of another shape. One whole parameter at a time. Those that zero::Init has sharded get their
/// dtype of `precision`, too, and slices stay sharded, over `groups.sums`. Collective over `groups.model`.
void cut_parameters(const TrainingGroups& groups, const PartitionPlan& plan, const PrecisionOptions& precision,
                    std::vector<NamedParameter>& parameters);

/// The part that rank `rank` has of `parameter`, of which ranks have `parts`; an element that several have is counted
/// by the first of them.
void set_part(NamedParameter& parameter, const std::vector<TensorPart>& parts, int rank);

/// Those of `module` by `names`, TrainingOptions::copies, become slices, as `plan` has them in their order, and are
/// cast as what they follow. Returns them. Local.
std::vector<NamedParameter> cut_copies(int rank, std::span<const PartitionedParameter> plan,
                                       const std::map<std::string, std::string>& names, const torch::nn::Module& module,
                                       const PrecisionOptions& precision);

/// Parameters that `plan` cuts become whole again, the same tensor objects. One at a time. Collective over `tensor`.
void join_parameters(Group& tensor, const PartitionPlan& plan, const std::vector<NamedParameter>& parameters);

/// Declares the slices to their pass, of `parameters` that a pager manages by now.
void add_slices(TensorParallel& pass, const PartitionPlan& plan, const TensorParallelOptions& options,
                const std::vector<NamedParameter>& parameters);

}  // namespace trireme
