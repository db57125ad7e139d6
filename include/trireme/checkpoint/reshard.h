// Who writes what and who reads what: pure functions of slices, without files or ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "trireme/checkpoint/manifest.h"

namespace trireme {

/// A TensorSlice without its data.
struct SliceSpec {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  int64_t begin = 0;
  int64_t numel = 0;
};

/// A slice that rank `rank` writes: entry `index` of its table.
struct SliceWrite {
  int rank = 0;
  size_t index = 0;
};

struct TensorWrites {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  std::vector<SliceWrite> slices;  ///< ascending by begin
};

/// Chooses for every slice one rank that writes it: of several holders of an equal slice the one with the fewest bytes
/// so far. Tensors stand in the order in which rank 0's table, then rank 1's, … first names them. Empty slices are left
/// out, except that an empty tensor keeps one.
///
/// Throws    CheckpointError, naming tensor and ranks: two shapes or dtypes for one name, a gap, a partial overlap, a slice
///           outside of its tensor.
std::vector<TensorWrites> plan_writes(const std::vector<std::vector<SliceSpec>>& table_of_rank);

/// Elements [begin, begin + numel) of saved slice `slice` of saved tensor `tensor` go to element `destination_begin` of
/// the caller's slice `destination`.
struct SliceRead {
  size_t tensor = 0;
  size_t slice = 0;
  size_t destination = 0;
  int64_t begin = 0;  ///< within the saved slice
  int64_t destination_begin = 0;
  int64_t numel = 0;
};

/// What must be read to fill `destinations`, by intersection of ranges; ordered by file and offset, so that a disk
/// reads forward. Names that the manifest does not have are left out.
///
/// Throws    CheckpointError: wrong shape or dtype (tensor, expected, found), a destination outside of its tensor.
std::vector<SliceRead> plan_reads(const Manifest& manifest, const std::vector<SliceSpec>& destinations);

/// Number of elements of `shape`. Throws CheckpointError naming `name`: a negative extent or a product beyond 2^62.
int64_t checked_numel(const std::vector<int64_t>& shape, const std::string& name);

}  // namespace trireme
