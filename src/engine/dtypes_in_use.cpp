// One line that says in which dtypes an engine keeps, sums and sends what it has.
#include <set>

#include "engine/buffers.h"
#include "trireme/base/error.h"
#include "trireme/engine/engine.h"
#include "trireme/precision/loss_scaling.h"

namespace trireme {

namespace {

using Dtypes = std::set<std::string>;

std::string join(const Dtypes& dtypes) {
  std::string text;
  for (const std::string& dtype : dtypes) text += (text.empty() ? "" : "+") + dtype;
  return text.empty() ? "none" : text;
}

}  // namespace

std::string Engine::dtypes_in_use() const {
  Dtypes weights, gradients, communication, masters, buffers;
  const PagerPolicy& policy = pager_->policy();
  // Where peers read gradients in place, these stand in the weights' dtype.
  const bool reads_in_place = policy.stage == 3 && policy.gather == GatherPolicy::kShared && !policy.deterministic;
  for (const UnitLayout& unit : pager_->layout().units) weights.insert(short_name(unit.dtype));
  for (const OwnedSlice& slice : pager_->owned()) {
    const UnitLayout& unit = pager_->layout().units[slice.unit];
    const bool is_lower = unit.communication_dtype == at::kBFloat16 || unit.communication_dtype == at::kHalf;
    const at::ScalarType kept = reads_in_place ? unit.dtype : slice.gradients.scalar_type();
    gradients.insert(short_name(slice.gradients.scalar_type()));
    communication.insert(short_name(is_lower ? unit.communication_dtype : kept));
    masters.insert("fp32");
  }
  for (const TensorSlice& buffer : buffers_->slices())
    if (at::isFloatingType(buffer.data.scalar_type())) buffers.insert(short_name(buffer.data.scalar_type()));
  if (!optimizer_) return str("dtypes: weights ", join(weights), ", buffers ", join(buffers));

  const bool has_states = !config_.optimizer || !optimizer_states(*config_.optimizer).empty();
  const AutocastOptions& autocast = config_.precision.autocast;
  std::string scale = "none";
  if (loss_scaling_) scale = str(loss_scale(), loss_scaling_->scaler().is_dynamic() ? " (dynamic)" : " (fixed)");
  return str("dtypes: weights ", join(weights), autocast.enabled ? ", autocast " + short_name(autocast.dtype) : "",
             ", gradients summed in ", join(gradients), " and sent in ", join(communication), ", masters ",
             join(masters), ", optimizer states ", has_states ? "fp32" : "none", ", buffers ", join(buffers),
             ", loss scale ", scale);
}

}  // namespace trireme
