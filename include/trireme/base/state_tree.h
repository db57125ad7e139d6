// The contents of a checkpoint as one rank has them: named tensors, each perhaps only a part or a slice, and values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "trireme/base/bytes.h"
#include "trireme/base/tensor_part.h"

namespace trireme {

/// The elements of a slice that are not in host memory, but for example on a drive. One thread at a time uses it.
class SliceStore {
 public:
  virtual ~SliceStore() = default;
  virtual at::ScalarType dtype() const = 0;
  virtual int64_t numel() const = 0;
  /// Fills `to` with the slice's bytes from `begin` on. Throws IoError.
  virtual void read(Bytes begin, std::span<std::byte> to) = 0;
  /// Replaces the slice's bytes from `begin` on. Throws IoError.
  virtual void write(Bytes begin, std::span<const std::byte> from) = 0;
};

/// This rank's piece of one global tensor: a part of it, or of the part's row-major flattening a range.
struct TensorSlice {
  std::string name;             ///< global name, as base/state_names.h makes it
  TensorPart part;              ///< of the global tensor; {shape}: all of it
  int64_t begin = 0;            ///< first element of this slice in the part's flattening
  at::Tensor data;              ///< 1-D, contiguous, on the host; written in place by a load
  SliceStore* store = nullptr;  ///< in place of `data`; outlives the state
  std::string values = {};      ///< of the whole tensor, a JSON object; every rank that has any says the same
};

/// The state of one rank. Values are JSON text.
struct StateTree {
  std::vector<TensorSlice> tensors;
  std::string values = "{}";       ///< the same on every rank (steps, schedule, configuration); rank 0's is written
  std::string rank_values = "{}";  ///< of this rank (its random number generator, its data position)
};

}  // namespace trireme
