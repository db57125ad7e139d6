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
// A rule only says what is cut. The pass brings arguments into that form, sums results over ranks where needed, and
// handles gradients.
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

/// A call of an operator with at least one tensor argument that is cut. Sizes are those of whole tensors.
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
  /// The argument as the operator gets it: this rank's slice if it is cut.
  const c10::IValue& argument(size_t index) const { return call_.arguments()[index]; }
  bool is_tensor(size_t index) const { return argument(index).isTensor() && argument(index).toTensor().defined(); }
  int64_t dims(size_t index) const { return argument(index).toTensor().dim(); }
  /// The dim of argument `index` that is cut; -1: it is whole, or no tensor.
  int64_t cut_dim(size_t index) const { return cuts_[index].dim; }
  /// Sizes of the whole argument.
  std::vector<int64_t> sizes(size_t index) const;
  /// Whether the operator writes its first argument in place.
  bool writes_first() const { return (call_.traits.written & 1) != 0; }

 private:
  const OperatorCall& call_;
  const std::vector<Cut>& cuts_;
};

/// In place of a result's dim: each rank's result is a summand, and the ranks add them up.
inline constexpr int64_t kSumOfRanks = -1;

/// How an operator runs on slices. Along the dims named here, rank r has the same slice of every tensor.
struct PartitionAnswer {
  /// By index, the dim in which a tensor argument is cut for the operator. Others are whole, the same on every rank.
  std::map<size_t, int64_t> arguments;
  /// The dim in which each result is cut, or kSumOfRanks; empty for an operator that writes its first argument.
  std::vector<int64_t> results;
};

/// A pure function of the operator and of sizes, which are the same on all ranks. Returns nothing if the operator must
/// run on whole tensors, which are then gathered.
using PartitionRule = std::function<std::optional<PartitionAnswer>(const PartitionCall&)>;

/// Sets the rule of operator `op` ("mine::product", or "mine::product.out" for one overload), for all threads. It takes
/// precedence over the library's own rule and replaces an earlier one.
///
/// Requires  from the slices that the rule names, the operator computes this rank's slices (or summands) of the
///           results, and its backward those of the gradients. That is not checked.
/// Throws    ConfigError: `op` is not of the form of an operator's name, or `rule` is empty.
void register_partition_rule(const std::string& op, PartitionRule rule);

}  // namespace trireme
