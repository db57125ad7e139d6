// Random placements of the arguments of operators, for trials of rows.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/activations/ranks_in_a_loop.h"
#include "tests/support/operators/cases.h"
#include "trireme/activations/call_arguments.h"
#include "trireme/base/error.h"

namespace trireme::testing {

using Random = std::mt19937_64;

inline const Axes& axes() {
  static const Axes all{AxisGrid({2, 3}), {GradientLaw::kShares, GradientLaw::kWhole}};
  return all;
}

inline int64_t below(Random& random, int64_t end) { return std::uniform_int_distribution<int64_t>(0, end - 1)(random); }
inline bool chance(Random& random, double share) { return std::bernoulli_distribution(share)(random); }

template <class Value>
Value one_of(Random& random, const std::vector<Value>& values) {
  return values[below(random, static_cast<int64_t>(values.size()))];
}

/// Ranges of `whole` indices in blocks, each of a random rank, of which every rank has one.
inline Ranges random_ranges(Random& random, int64_t whole, int ranks, bool is_sorted) {
  std::vector<int64_t> sizes;
  for (int64_t block = 1; block <= whole; ++block)
    if (whole % block == 0 && whole / block >= ranks) sizes.push_back(block);
  const int64_t block = one_of(random, sizes);
  std::vector<int> owners;
  for (int64_t i = 0; i < whole / block; ++i)
    owners.push_back(i < ranks ? static_cast<int>(i) : static_cast<int>(below(random, ranks)));
  is_sorted ? std::ranges::sort(owners) : std::ranges::shuffle(owners, random);
  std::vector<std::vector<Interval>> of_rank(ranks);
  for (int64_t i = 0; i < whole / block; ++i) of_rank[owners[i]].push_back({i * block, (i + 1) * block});
  return {whole, std::move(of_rank)};
}

/// Each axis cuts a dim, or none; a later axis may cut what an earlier one leaves of the same dim.
inline Placement random_placement(Random& random, const std::vector<int64_t>& sizes,
                                  const AxisGrid& grid = axes().grid) {
  Placement placement(grid.positions());
  std::vector<std::vector<int64_t>> left(grid.positions(), sizes);
  for (int axis = 0; axis < grid.axes(); ++axis) {
    const int ranks = grid.ranks(axis);
    std::vector<int64_t> dims;
    for (size_t d = 0; d < sizes.size(); ++d)
      if (std::ranges::all_of(left, [&](const auto& one) { return one[d] >= ranks; }))
        dims.push_back(static_cast<int64_t>(d));
    const bool is_sorted = chance(random, 0.6);
    if (dims.empty() || !chance(random, 0.7)) continue;
    const int64_t dim = one_of(random, dims);
    std::map<int64_t, Cut> made;  // alike where sizes are
    for (int position = 0; position < grid.positions(); ++position) {
      const int64_t size = left[position][dim];
      if (!made.contains(size)) {
        std::vector<int64_t> outers;
        for (const int64_t outer : {1, 1, 2, 3})
          if (size % outer == 0 && size / outer >= ranks) outers.push_back(outer);
        const int64_t outer = one_of(random, outers);
        made[size] = {axis, dim, outer,
                      std::make_shared<const Ranges>(random_ranges(random, size / outer, ranks, is_sorted))};
      }
      placement.at(position).push_back(made[size]);
      left[position][dim] = made[size].local(grid.rank(position, axis));
    }
  }
  return placement;
}

/// Whether libtorch gives no gradient of a floating-point argument of this name.
inline bool is_constant(const std::string& op, const std::string& argument) {
  const bool is_loss = op.find("binary_cross_entropy") != op.npos || op.find("soft_margin_loss") != op.npos;
  return argument == "running_mean" || argument == "running_var" ||
         (is_loss && (argument == "weight" || argument == "target" || argument == "pos_weight"));
}

/// By tensor among arguments: whether it gets a gradient.
inline std::vector<bool> differentiable(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  std::vector<bool> all;
  for (size_t i = 0; i < arguments.size(); ++i)
    for (const at::Tensor& tensor : tensors_among({arguments[i]}))
      all.push_back(tensor.defined() && tensor.is_floating_point() &&
                    !is_constant(op.schema().name(), op.schema().arguments()[i].name()));
  return all;
}

/// Sizes of tensors, and plain arguments.
inline std::string text_of(const OperatorCase& one) {
  std::string text = one.op + "(";
  for (const c10::IValue& argument : one.arguments) {
    if (text.back() != '(') text += ", ";
    const std::vector<at::Tensor> tensors = tensors_among({argument});
    for (const at::Tensor& tensor : tensors) text += tensor.defined() ? str(tensor.sizes()) : "undefined";
    if (tensors.empty()) text += str(argument);
  }
  return text + ")";
}

/// TRIREME_ROW_TRIALS of each operator, and as many chains; TRIREME_ROW_SEED.
inline int64_t of_environment(const char* name, int64_t otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? std::atoll(value) : otherwise;
}

}  // namespace trireme::testing
