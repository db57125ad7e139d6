// Told of every gradient that autograd finishes for a parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "trireme/base/torch/nodes.h"

namespace trireme {

class GradientWatch {
 public:
  /// `accept` gets the index of the parameter whose grad() has just been written, on autograd's thread.
  explicit GradientWatch(std::function<void(int)> accept) : accept_(std::move(accept)) {}
  ~GradientWatch() { end(); }
  GradientWatch(const GradientWatch&) = delete;
  GradientWatch& operator=(const GradientWatch&) = delete;

  void add(const at::Tensor& parameter, int index);
  void end();

 private:
  struct Watched {
    NodePtr accumulator;  // autograd holds it weakly: without us the hook would go
    uintptr_t hook;
  };

  const std::function<void(int)> accept_;
  std::vector<Watched> watched_;
};

/// `gradient` [numel], in the order in which the parameter's bytes stand in memory, in its dtype.
at::Tensor flat_gradient(const at::Tensor& parameter, at::Tensor gradient);

}  // namespace trireme
