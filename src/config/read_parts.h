// The parts of the configuration, each read from its own section.
#pragma once

#include "config/section.h"
#include "trireme/config/config.h"

namespace trireme {

/// The batch triple, resolved as DeepSpeed does: what is missing follows from the others and the data degree.
BatchSizes read_batch_sizes(Section& top, int data_degree);

/// bf16, fp16, torch_autocast, data_types, communication_data_type. The pager's accumulation dtype follows from the
/// result.
PrecisionOptions read_precision(Section& top);

/// gradient_allreduce_op, prescale_gradients, gradient_predivide_factor.
void read_gradient_reduction(Section& top, int data_degree, PagerPolicy& pager);

std::optional<OptimizerOptions> read_optimizer(Section& top);
std::optional<ScheduleOptions> read_scheduler(Section& top);

/// `trireme.tiled`.
TilePolicy read_tiled(Section& own);
/// `trireme.recompute`.
RecomputeConfig read_recompute(Section& own);

/// `offload_optimizer` and `offload_param` of `zero_optimization`, and the old switches for them.
void read_offload(Section& zero, PagerPolicy& pager);

/// `activation_checkpointing`: DeepSpeed's section switches nothing on, it only tunes what a program's own calls do.
void read_activation_checkpointing(Section& top);

/// `checkpoint`.
CheckpointOptions read_checkpoint(Section& top);

/// `zero_optimization` and `trireme`: how model states are held. `precision` turns elements into bytes.
void read_zero(Section& top, const PrecisionOptions& precision, Config& config);

}  // namespace trireme
