// The rules by which operators run on slices, found by operator.
#pragma once

#include <memory>
#include <unordered_map>

#include "trireme/operators/rules.h"
#include "trireme/tensor/partition_rule.h"

namespace trireme::tensor {

/// The library's own rule of a role; null: a handler of the pass has it.
const PartitionRule* rule_of_role(OperatorRole role);

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
