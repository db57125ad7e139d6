// Where the numbers of a tensor are, when the stages of a step function own parts of an unmodified model.
#pragma once

#include <cstdint>

namespace trireme {

/// The stage that has a tensor's numbers. A tensor without a home is replicated: every stage has it and computes with
/// it.
struct Home {
  int stage = 0;
  bool is_parameter = false;  ///< a trained one, or a result of such alone
  uint64_t born = 0;          ///< when the tensor was made, in program order, alike on all stages; 0: before the step
  bool operator==(const Home&) const = default;
};

/// The end of errors about a part of a step function that runs again.
inline constexpr const char* kNoSecondRun =
    "a part of a step function that runs again in the backward pass (recompute()) has neither "
    "tensors of other stages nor the random numbers that it drew; write `trireme.recompute` = \"selective\"";

}  // namespace trireme
