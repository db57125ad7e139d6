// Calls of libtorch's operators at random, to try their rows with.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace trireme::testing {

/// One call, on tensors of the whole: of double, or of int64 where they are places, or of bool.
struct OperatorCase {
  std::string op;  ///< "aten::add.Tensor"
  std::vector<c10::IValue> arguments;
  bool is_smooth = true;  ///< its gradients do not jump
};

/// `sizes`: of the first tensor; empty: at random. Nothing: the operator does not take such a tensor.
using MakeCase = std::function<std::optional<OperatorCase>(std::mt19937_64& random, std::vector<int64_t> sizes)>;

struct NamedCase {
  std::string name;
  MakeCase make;
  bool is_in_chains = false;  ///< its first argument may be the result of another one
};

/// One for each operator and kind of call that the table has.
const std::vector<NamedCase>& operator_cases();

}  // namespace trireme::testing
