#include "trireme/config/init_policy.h"

namespace trireme {

zero::InitPolicy init_policy(const Config& config) {
  zero::InitPolicy policy;
  policy.enabled = config.pager.stage == 3;
  if (config.precision.weight_dtype != at::kFloat) policy.dtype = config.precision.weight_dtype;
  return policy;
}

}  // namespace trireme
