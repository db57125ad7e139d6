// The choice that ownership makes for operators that draw.
#pragma once

#include <cstdint>

#include "trireme/intercept.h"

namespace trireme::testing {

/// While it lives, operators draw by seeds, one after the other from `first` on.
class DrawBySeeds final : public Pass {
 public:
  explicit DrawBySeeds(uint64_t first) : next_(first) {}
  PassOrder order() const override { return PassOrder::kOwnership; }
  void run(OperatorCall& call, Next next) override {
    if (call.traits.random) call.seed = next_++;
    next(call);
  }

 private:
  uint64_t next_;
  const InterceptScope scope_{InterceptScope::Watch::kWrites, this};
};

}  // namespace trireme::testing
