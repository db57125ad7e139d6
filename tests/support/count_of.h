// How often an operator runs.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "trireme/intercept.h"

namespace trireme::testing {

/// Counts the operators of one name while it lives, in forward, backward and recomputation.
class CountOf final : public Pass {
 public:
  /// Those that passes of `order` see.
  explicit CountOf(std::string name, PassOrder order = PassOrder::kTouch) : name_(std::move(name)), order_(order) {}
  PassOrder order() const override { return order_; }
  void run(OperatorCall& call, Next next) override {
    count += call.op.schema().name() == name_;
    next(call);
  }
  int64_t count = 0;

 private:
  const std::string name_;
  const PassOrder order_;
  const InterceptScope scope_{InterceptScope::Watch::kWrites, this};
};

}  // namespace trireme::testing
