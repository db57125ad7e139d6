// Selective recomputation: cheap operators are computed again in backward, costly ones are not. The model is
// unmodified.
//
//   const trireme::SelectiveRecompute scope;      // matrix products and attention are kept
//   for (auto& batch : loader) { … }              // any model, any loss
//
// The main idea: the interceptor writes down each cheap operator with its arguments (a recipe). When autograd wants to
// save a tensor that a recipe gives, from tensors that are held anyway, the recipe is saved instead.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/recompute/recompute.h"

namespace trireme {

/// Which operators are computed again.
struct SelectivePolicy {
  /// Operators of the `aten` namespace that are never computed again, by name without overload, beside matrix products,
  /// convolutions, attention, recurrent nets and batch norms. Operators of other namespaces never are.
  std::vector<std::string> keep = {};
  /// Matrix products whose results are larger than their left inputs are computed again too, up to this share of
  /// the multiply-adds of forward and backward. At most 1/3, which is all of forward.
  double extra_compute = 0;

  bool operator==(const SelectivePolicy&) const = default;
};

/// Throws ConfigError: extra_compute is not from 0 to 1/3.
void check(const SelectivePolicy& policy);

/// Counts of a scope's work.
struct SelectiveCounters {
  int64_t kept_bytes = 0;     ///< of storages that autograd or recipes hold, without parameters
  int64_t dropped_bytes = 0;  ///< of storages that autograd would have saved
  int64_t recomputed = 0;     ///< operators that ran again
};

/// Recomputes what autograd saves on this thread while it lives, outside of recompute(). Construct and destroy on the
/// same thread; graphs made meanwhile may run backward later.
///
/// With `is_parameter` it acts on one model alone: on operators that read a tensor for which that is true, and on those
/// that read a result of such operators. Other operators, and what they save, stay as they are.
///
/// A tensor is dropped if computing it again starts from tensors that take less new memory than it does. Gradients are
/// those without it, bit by bit.
///
/// Cost      forward: about a microsecond per operator; backward: the operators that are counted as recomputed, each
///           once per backward pass.
/// Throws    ConfigError as check(). From backward: RecomputeError when a saved tensor was written in between.
/// Source    arXiv:2205.05198 (selective activation recomputation). Test: selective_test.cpp.
class [[nodiscard]] SelectiveRecompute {
 public:
  using IsParameter = std::function<bool(const at::Tensor&)>;
  explicit SelectiveRecompute(const SelectivePolicy& policy = {}, IsParameter is_parameter = nullptr);
  ~SelectiveRecompute();
  SelectiveRecompute(const SelectiveRecompute&) = delete;
  SelectiveRecompute& operator=(const SelectiveRecompute&) = delete;

  /// Sums since construction.
  SelectiveCounters counters() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
