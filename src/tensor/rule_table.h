// The rules of programs by which operators run on slices, found by operator.
#pragma once

#include <memory>
#include <unordered_map>

#include "trireme/activations/axis_pass.h"
#include "trireme/tensor/partition_rule.h"

namespace trireme::tensor {

/// Rules that programs have registered, without looking at names again. For one thread.
class RegisteredRules {
 public:
  /// The rows of a rule along an axis; null: there is none.
  std::shared_ptr<const OwnRow> operator()(AxisPass& pass, int axis, const c10::OperatorHandle& op);

 private:
  std::unordered_map<c10::OperatorHandle, std::shared_ptr<const OwnRow>> known_;
  size_t registrations_ = 0;
};

}  // namespace trireme::tensor
