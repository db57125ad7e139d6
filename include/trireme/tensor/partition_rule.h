// Rules for operators on slices of layers: those of programs, which the library does not know, and its own.
//
//   // y[.., n] = gain * sum over k of x[.., k] * weight[n, k]
//   register_partition_rule("mine::scaled_product", [](const PartitionCall& call) -> std::optional<PartitionAnswer> {
//     const int64_t last = call.dims(0) - 1;
//     if (call.cut_dim(1) == 0) return PartitionAnswer{.arguments = {{1, 0}}, .results = {last}};
//     if (call.cut_dim(1) == 1) return PartitionAnswer{.arguments = {{0, last}, {1, 1}}, .results = {kSumOfRanks}};
//     return {};
//   });
//
// A rule only says what is cut. The pass brings arguments to that form, adds up, and sees to gradients.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "trireme/intercept.h"

namespace trireme {

/// A call of an operator, of which some tensor argument is cut. Sizes are the whole's.
class PartitionCall {
 public:
  /// The dim of an argument that is cut, and its size in the whole.
  struct Cut {
    int64_t dim = -1, size = 0;
  };
  /// `cuts`: of each argument. All outlive this.
  PartitionCall(const OperatorCall& call, const std::vector<Cut>& cuts) : call_(call), cuts_(cuts) {}

  const std::string& name() const { return call_.op.schema().name(); }
  size_t arguments() const { return cuts_.size(); }
  size_t results() const { return call_.op.schema().returns().size(); }
  /// As the operator gets it: of a tensor that is cut, this rank's slice.
  const c10::IValue& argument(size_t index) const { return call_.arguments()[index]; }
  bool is_tensor(size_t index) const { return argument(index).isTensor() && argument(index).toTensor().defined(); }
  int64_t dims(size_t index) const { return argument(index).toTensor().dim(); }
  /// The dim of argument `index` that is cut; -1: it is whole, or no tensor.
  int64_t cut_dim(size_t index) const { return cuts_[index].dim; }
  std::vector<int64_t> sizes(size_t index) const;
  /// Whether the operator writes its first argument in place.
  bool writes_first() const { return (call_.traits.written & 1) != 0; }

 private:
  const OperatorCall& call_;
  const std::vector<Cut>& cuts_;
};

/// As a result's dim: each rank's result is a part of a sum, which the ranks add up.
inline constexpr int64_t kSumOfRanks = -1;

/// How an operator runs on slices. All that is cut has the same ranks' slices along the dims that are named here.
struct PartitionAnswer {
  /// By index, the dim in which a tensor argument is cut for the operator. Others are whole, the same on every rank.
  std::map<size_t, int64_t> arguments;
  /// The dim in which each result is cut, or kSumOfRanks; empty for an operator that writes its first argument.
  std::vector<int64_t> results;
};

/// Pure: by the operator and sizes, which are alike on all ranks. Nothing: it runs on whole tensors, which are
/// gathered.
using PartitionRule = std::function<std::optional<PartitionAnswer>(const PartitionCall&)>;

/// From now on `rule` says how the operator runs that is named as in "mine::product" or, for one overload, as in
/// "mine::product.out". Before the library's own rule; in place of an earlier one. For all threads.
///
/// Requires  each rank computes the results' slices, or parts of the sum, by the slices of the arguments that the rule
///           names, and the operator's backward does as its forward: nothing here can tell.
/// Throws    ConfigError: no name of an operator's form, or no rule.
void register_partition_rule(const std::string& op, PartitionRule rule);

}  // namespace trireme
