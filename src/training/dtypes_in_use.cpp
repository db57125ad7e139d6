#include "training/dtypes_in_use.h"

#include <set>

#include "trireme/base/error.h"

namespace trireme {

namespace {

using Dtypes = std::set<std::string>;

std::string join(const Dtypes& dtypes) {
  std::string text;
  for (const std::string& dtype : dtypes) text += (text.empty() ? "" : "+") + dtype;
  return text.empty() ? "none" : text;
}

}  // namespace

std::string dtypes_in_use(const Config& config, const Pager& pager, const Buffers& all_buffers, TrainStep& step) {
  Dtypes weights, gradients, communication, masters, buffers;
  const PagerPolicy& policy = pager.policy();
  // Where peers read gradients in place, these stand in the weights' dtype.
  const bool reads_in_place = policy.stage == 3 && policy.gather == GatherPolicy::kShared && !policy.deterministic;
  for (const UnitLayout& unit : pager.layout().units) weights.insert(short_name(unit.dtype));
  for (const OwnedSlice& slice : pager.owned()) {
    const UnitLayout& unit = pager.layout().units[slice.unit];
    const bool is_lower = unit.communication_dtype == at::kBFloat16 || unit.communication_dtype == at::kHalf;
    const at::ScalarType kept = reads_in_place ? unit.dtype : slice.gradients.scalar_type();
    gradients.insert(short_name(slice.gradients.scalar_type()));
    communication.insert(short_name(is_lower ? unit.communication_dtype : kept));
    masters.insert("fp32");
  }
  for (const TensorSlice& buffer : all_buffers.slices())
    if (at::isFloatingType(buffer.data.scalar_type())) buffers.insert(short_name(buffer.data.scalar_type()));
  if (step.optimizer() == nullptr) return str("dtypes: weights ", join(weights), ", buffers ", join(buffers));

  const bool has_states = !config.optimizer || !optimizer_states(*config.optimizer).empty();
  const AutocastOptions& autocast = config.precision.autocast;
  std::string scale = "none";
  if (const auto now = step.loss_scale())
    scale = str(*now, config.precision.loss_scale.loss_scale == 0 ? " (dynamic)" : " (fixed)");
  return str("dtypes: weights ", join(weights), autocast.enabled ? ", autocast " + short_name(autocast.dtype) : "",
             ", gradients summed in ", join(gradients), " and sent in ", join(communication), ", masters ",
             join(masters), ", optimizer states ", has_states ? "fp32" : "none", ", buffers ", join(buffers),
             ", loss scale ", scale);
}

}  // namespace trireme
