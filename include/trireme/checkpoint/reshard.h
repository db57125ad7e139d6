// The reshard plan: who writes and who reads which slice. Pure functions, without files or ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "trireme/base/tensor_part.h"
#include "trireme/checkpoint/manifest.h"

namespace trireme {

/// A TensorSlice without its data.
struct SliceSpec {
  std::string name;
  TensorPart part;  ///< canonical
  at::ScalarType dtype = at::kFloat;
  int64_t begin = 0;
  int64_t numel = 0;
  std::string values = {};
};

/// Elements [begin, begin + numel) of a part's flattening, which rank `rank` writes from entry `index` of its table.
struct SliceWrite {
  int part = 0;  ///< of TensorWrites::parts
  int64_t begin = 0;
  int64_t numel = 0;
  int rank = 0;
  size_t index = 0;
};

/// The ranks that write one tensor, and their slices.
struct TensorWrites {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<TensorPart> parts;   ///< together the tensor
  std::vector<SliceWrite> slices;  ///< by part, then by begin
  std::string values;

  const std::vector<int64_t>& shape() const { return parts.front().shape; }
};

/// Chooses for every slice one rank that writes it: of several holders of an equal slice the one with the fewest bytes
/// so far. Tensors stand in the order in which rank 0's table, then rank 1's, … first names them. Empty slices are left
/// out, except that an empty tensor keeps one.
///
/// Cost      memory for each distinct slice, and 16 bytes for each rank that holds it; no table is kept.
class WritePlanner {
 public:
  /// Tables come by ascending rank. Throws CheckpointError, naming tensor and ranks: two shapes, dtypes or values for
  /// one name, a slice outside of its part.
  void add(int rank, std::vector<SliceSpec> table);
  /// Throws    CheckpointError, naming tensor and ranks: a gap, an overlap of slices that are not equal.
  std::vector<TensorWrites> finish();

 private:
  struct Holder {
    int rank = 0;
    size_t index = 0;
  };
  struct Cut {
    TensorPart part;
    std::map<std::pair<int64_t, int64_t>, std::vector<Holder>> holders;  ///< by begin and numel
  };
  struct Tensor {
    std::string name;
    at::ScalarType dtype = at::kFloat;
    int first_rank = 0;
    std::string values;
    int values_rank = 0;
    std::vector<Cut> cuts;
  };

  Tensor& tensor_of(int rank, const SliceSpec& slice);
  void add_slices(const Tensor& tensor, const Cut& cut, TensorWrites& writes);

  std::vector<Tensor> tensors_;
  std::unordered_map<std::string, size_t> index_of_;
  std::vector<int64_t> bytes_of_rank_;
};

/// WritePlanner over the tables of ranks 0, 1, ….
std::vector<TensorWrites> plan_writes(const std::vector<std::vector<SliceSpec>>& table_of_rank);

/// Elements of saved slice `slice` of saved tensor `tensor` that go to the caller's slice `destination`. In each run
/// `a` counts from the beginning of the saved slice, `b` from that of the destination.
struct SliceRead {
  size_t tensor = 0;
  size_t slice = 0;
  size_t destination = 0;
  std::vector<PartRun> runs;
};

/// The reads of one saved tensor that fill the elements `range` of the flattening of `part`. Throws nothing.
std::vector<SliceRead> plan_tensor_reads(const SavedTensor& saved, const TensorPart& part, const Interval& range);

/// The reads that fill `destinations`, ordered by file and offset, so that a disk reads forward. Names that the
/// manifest does not have are left out.
///
/// Throws    CheckpointError: wrong shape or dtype (tensor, expected, found), a destination outside of its part.
std::vector<SliceRead> plan_reads(const Manifest& manifest, const std::vector<SliceSpec>& destinations);

/// Throws    CheckpointError that opens with `where`: non-empty parts that do not cut the tensor along one dim into
///           intervals without gap or overlap; `who` names the part of an index.
void check_parts(const std::vector<TensorPart>& parts, const std::string& where,
                 const std::function<std::string(size_t)>& who);

}  // namespace trireme
