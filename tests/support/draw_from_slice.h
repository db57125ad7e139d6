// The choice that tensor parallelism makes for activations that are cut.
#pragma once

#include <string>
#include <utility>

#include "trireme/intercept.h"

namespace trireme::testing {

/// While it lives, operators of one name draw from kSlice.
class DrawFromSlice final : public Pass {
 public:
  explicit DrawFromSlice(std::string name = "aten::dropout") : name_(std::move(name)) {}
  PassOrder order() const override { return PassOrder::kTensor; }
  void run(OperatorCall& call, Next next) override {
    if (call.op.schema().name() == name_) call.stream = RandomStream::kSlice;
    next(call);
  }

 private:
  const std::string name_;
  const InterceptScope scope_{InterceptScope::Watch::kWrites, this};
};

}  // namespace trireme::testing
