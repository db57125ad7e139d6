// What is saved and loaded: named tensors, each possibly only a slice on this rank, and values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

/// This rank's part of one global tensor: elements [begin, begin + data.numel()) of its row-major flattening.
struct TensorSlice {
  std::string name;  ///< global name, e.g. "model.layers.0.wq.weight" or "optimizer.exp_avg.layers.0.wq.weight"
  std::vector<int64_t> shape;  ///< of the whole tensor
  int64_t begin = 0;           ///< first element of this slice
  at::Tensor data;             ///< 1-D, contiguous, on the host; written in place by a load
};

/// The state of one rank. Tensors are slices; `values` and `rank_values` are JSON text.
struct StateTree {
  std::vector<TensorSlice> tensors;
  std::string values = "{}";       ///< the same on every rank (steps, schedule, configuration); rank 0's is written
  std::string rank_values = "{}";  ///< of this rank (its random number generator, its data position)
};

}  // namespace trireme
