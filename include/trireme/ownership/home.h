// Where the numbers of a tensor are, when the stages of a step function own parts of an unmodified model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace trireme {

/// The stage that has a tensor's numbers. A tensor without a home is replicated: every stage has it and computes with
/// it.
struct Home {
  int stage = 0;
  bool is_parameter = false;  ///< a trained one, or a result of such alone
  uint64_t born = 0;          ///< when the tensor was made, in program order, alike on all stages; 0: before the step
  bool operator==(const Home&) const = default;
};

/// "'h.7.weight' is on stage 1", of a tensor of another stage than this one's; nothing: it is here, or has no stage.
std::optional<std::string> elsewhere(const at::Tensor& tensor);

/// The end of errors about a part of a step function that runs again.
inline constexpr const char* kNoSecondRun =
    "a part of a step function that runs again in the backward pass (recompute()) has neither "
    "tensors of other stages nor the random numbers that it drew; write `trireme.recompute` = \"selective\"";

}  // namespace trireme
