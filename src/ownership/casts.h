// Autocast's 16-bit copies of a micro-batch's weights on this stage.
//
// Autocast makes one of each weight while its context lasts, so that the gradients of all uses are added up in 16 bits.
// Its cache is one for all threads and knows tensors by their address; this one is a micro-batch's own, and what it has
// crosses from piece to piece as any tensor does.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>

#include "ownership/pieces.h"
#include "trireme/intercept.h"

namespace trireme::ownership {

class Casts {
 public:
  /// The copy that the operator uses in place of its argument `weight`; undefined: there is none.
  at::Tensor of(const OperatorCall& call, const at::Tensor& weight, Pieces& pieces, const Next& next);
  /// Whether of() gives one.
  static bool has(const OperatorCall& call, const at::Tensor& weight);
  /// A context of autocast has ended.
  void clear() { casts_.clear(); }

 private:
  struct Cast {
    at::Tensor weight, lower;
  };
  std::unordered_map<const c10::TensorImpl*, Cast> casts_;
};

}  // namespace trireme::ownership
