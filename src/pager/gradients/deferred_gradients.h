// Gradients that stay on this rank, summed over backward passes, until a reduction is wanted again.
#pragma once

#include <utility>
#include <vector>

#include "pager/weights/store.h"

namespace trireme {

class DeferredGradients {
 public:
  explicit DeferredGradients(const StoreContext& context) : context_(context), sums_(context.parameters.size()) {}

  /// Adds `gradient` of `parameter`, flat in the parameter's memory order, in the accumulation dtype.
  void add(int parameter, const at::Tensor& gradient);
  /// The sum for `parameter`, which is forgotten here; undefined where there is none.
  at::Tensor take(int parameter) { return std::exchange(sums_[parameter], at::Tensor()); }
  /// The same, kept here.
  const at::Tensor& sum_of(int parameter) const { return sums_[parameter]; }
  bool has(int parameter) const { return sums_[parameter].defined(); }
  void add_to(PagerMemory& memory) const;

 private:
  StoreContext context_;
  std::vector<at::Tensor> sums_;  // by parameter
};

}  // namespace trireme
