// The rules of programs by which operators run on slices, found by operator.
#pragma once

#include <memory>
#include <unordered_map>

#include "trireme/tensor/partition_rule.h"

namespace trireme::tensor {

/// Rules that programs have registered, without looking at names again. For one thread.
class RegisteredRules {
 public:
  /// Null: none.
  std::shared_ptr<const PartitionRule> operator()(const c10::OperatorHandle& op);

 private:
  std::unordered_map<c10::OperatorHandle, std::shared_ptr<const PartitionRule>> known_;
  size_t registrations_ = 0;
};

}  // namespace trireme::tensor
