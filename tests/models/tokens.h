// Tokens that the tests of all models feed them.
#pragma once

#include <torch/utils.h>

namespace trireme::testing {

/// [batch, seq] of a vocabulary of 11.
inline at::Tensor tokens(int64_t batch, int64_t seq) { return torch::randint(0, 11, {batch, seq}, torch::kLong); }

}  // namespace trireme::testing
