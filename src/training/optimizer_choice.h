// An OptimizerChoice is checked before anything is changed, and made into an optimizer after that.
#pragma once

#include <memory>
#include <vector>

#include "training/stage_tensors.h"
#include "trireme/comm/group.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/plan.h"
#include "trireme/precision/precision.h"
#include "trireme/step/hyperparameters.h"
#include "trireme/training/options.h"

namespace trireme {

/// Throws ConfigError: two optimizers, options out of range, an optimizer of whole parameters where layers are cut over
/// the tensor ranks of `plan`, or one that has no update in the dtype or rounding of `precision`.
void check(const OptimizerChoice& choice, const ParallelPlan& plan, const PrecisionOptions& precision,
           const DiskSpace& disk, const DiskSpace& weights);

/// A choice by this rank's parameters.
struct PreparedOptimizer {
  GroupedParameters grouped = {};
  ClientOptimizerFactory client = {};
  LrScheduleOptions schedule = {};

  bool is_empty() const { return grouped.options.empty() && !client; }
};

/// This rank's `count` parameters of `model`. Local.
/// Throws    ConfigError: nothing can be trained; a parameter group or schedule that does not fit.
PreparedOptimizer prepare(const OptimizerChoice& choice, const WholeModel& model, size_t count);

/// Collective. Every rank throws where one's factory makes no optimizer that can be stepped: that one its own error.
/// Does nothing without a client's optimizer.
void try_client(Group& group, const OptimizerChoice& choice, const std::vector<ParameterSpec>& parameters,
                c10::Device device);

/// Collective, as ShardedOptimizer is.
std::unique_ptr<ShardedOptimizer> make_optimizer(PreparedOptimizer& prepared, Pager& pager, Group& group,
                                                 const PrecisionOptions& precision, const DiskSpace& disk);

/// The hyperparameters of what make_optimizer() has made; `optimizer` null: none.
Hyperparameters hyperparameters_of(const PreparedOptimizer& prepared, const ShardedOptimizer* optimizer);

}  // namespace trireme
