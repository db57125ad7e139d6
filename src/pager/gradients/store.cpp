#include "pager/gradients/store.h"

#include <algorithm>

namespace trireme {

void GradientStore::clear() {
  std::fill(touched_.begin(), touched_.end(), 0);
  home_.clear();
}

void GradientStore::add_to(PagerCounters& counters) const {
  counters.reductions += reductions_;
  counters.reduced_bytes += reduced_bytes_;
}

void GradientStore::count(const at::Tensor& message) {
  reduced_bytes_ += static_cast<int64_t>(message.nbytes());
  ++reductions_;
}

std::unique_ptr<GradientStore> make_gradients(const StoreContext& context, int mesh) {
  const PagerPolicy& policy = context.policy;
  if (policy.deterministic) return make_backward_gradients(context, mesh);  // others have no order of micro-batches
  if (policy.stage == 3 && policy.gather == GatherPolicy::kShared) return make_one_sided_gradients(context, mesh);
  // Offloaded gradients leave during backward, at every stage.
  const bool at_boundary = policy.stage <= 1 || MeshContext(context, mesh).is_alone_on_device();
  return at_boundary && context.offload.is_empty() ? make_window_gradients(context, mesh)
                                                   : make_backward_gradients(context, mesh);
}

}  // namespace trireme
