// Random sizes, tensors and arguments of calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/operators/cases.h"

namespace trireme::testing {

using Sizes = std::vector<int64_t>;

struct Draw {
  std::mt19937_64& random;

  int64_t below(int64_t count) { return between(0, count - 1); }
  /// Both ends, too.
  int64_t between(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random); }
  bool chance(double share) { return std::bernoulli_distribution(share)(random); }
  template <typename T>
  T of(const std::vector<T>& values) {
    return values[below(static_cast<int64_t>(values.size()))];
  }
  /// A size above 1.
  int64_t size() { return of<int64_t>({2, 3, 4, 6}); }
  Sizes sizes(int64_t least, int64_t most);
  /// Sizes that are broadcast to `sizes`.
  Sizes broadcast(const Sizes& sizes);
  /// Between 0.5 and 1.5, of double.
  at::Tensor floats(const Sizes& sizes);
  at::Tensor bools(const Sizes& sizes);
  /// Below `count`, of int64.
  at::Tensor places(const Sizes& sizes, int64_t count);
  /// As places(), and each once along `dim`.
  at::Tensor distinct_places(const Sizes& sizes, int64_t dim, int64_t count);
};

using Given = std::vector<std::pair<std::string, c10::IValue>>;

/// A call with what is given by name, and otherwise what the schema says.
OperatorCase call_of(const std::string& op, const Given& given);

using Maker = std::optional<OperatorCase> (*)(Draw& draw, const std::string& op, Sizes sizes);
struct MakerOfNames {
  Maker make;
  const char* names;  ///< without "aten::", with overloads
};

/// Those of the families in cases_of_dims.cpp and cases_of_products.cpp.
std::vector<MakerOfNames> makers_of_dims();
std::vector<MakerOfNames> makers_of_products();

}  // namespace trireme::testing
