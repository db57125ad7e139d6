#include "trireme/comm/stop_agreement.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace trireme {
namespace {

bool is_any(Group& group, bool own) {
  if (group.size() == 1) return own;
  const auto flag = at::zeros({1}, at::kInt);
  flag.mutable_data_ptr<int>()[0] = own ? 1 : 0;
  group.all_reduce(flag, ReduceOp::kMax).wait();
  return flag.const_data_ptr<int>()[0] != 0;
}

}  // namespace

bool stop_requested(Group& group) { return is_any(group, stop_requested()); }

bool take_save_request(Group& group) { return is_any(group, take_save_request()); }

}  // namespace trireme
