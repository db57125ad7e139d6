// The table of options: every key of the one schema, in the order in which resolved_config.json has them.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "config/document/option.h"
#include "trireme/config/config.h"

namespace trireme {

/// Every key outside of `optimizer` and `scheduler`.
const std::vector<Option<Config>>& options();

/// Brings old and short forms of sections into the schema's, with a warning where they are deprecated.
void bring_up_to_date(Document& file);

/// Everything that follows from several keys, once each of them is read.
void resolve(Document& file, Config& config, int world_size);

/// Above it no machine holds a batch. Below 1 read_batch_sizes() refuses.
inline constexpr IntegerRange kBatchSize = {.max = std::numeric_limits<int32_t>::max(),
                                            .words = "an integer from 1 to 2147483647"};

/// The batch triple, resolved as DeepSpeed does: absent sizes follow from the others and the data degree.
BatchSizes read_batch_sizes(const Document& file, int data_degree);

// `optimizer` and `scheduler`: which keys there are depends on `type`.
void read_optimizer(Document& file, Config& config, std::vector<KnownKey>& known);
void read_scheduler(Document& file, Config& config, std::vector<KnownKey>& known);
Json optimizer_json(const OptimizerOptions& options);
Json scheduler_json(const LrScheduleOptions& options);
const std::vector<Option<OptimizerOptions>>& optimizer_options();
const std::vector<Option<LrScheduleOptions>>& scheduler_options();

}  // namespace trireme
