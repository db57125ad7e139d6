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

}  // namespace trireme
