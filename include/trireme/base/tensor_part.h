// The part of a global tensor that one rank's tensor is, and where two parts meet: pure arithmetic on indices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

/// Indices [begin, end).
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

/// A rank's tensor holds the indices `intervals` of dim `dim` of the global tensor of `shape`, concatenated: one
/// interval for a column- or row-parallel weight, three for a fused QKV weight. Without `dim` it is all of the tensor.
struct TensorPart {
  std::vector<int64_t> shape;            ///< of the global tensor
  int dim = -1;                          ///< that it is cut along; -1: none
  std::vector<Interval> intervals = {};  ///< of `dim`, ascending, disjoint, none empty; no interval: no element
  bool operator==(const TensorPart&) const = default;
};

/// Number of elements of `shape`. Throws CheckpointError naming `name`: a negative extent or a product beyond 2^62.
int64_t checked_numel(const std::vector<int64_t>& shape, const std::string& name);

/// "[4, 8]".
std::string shape_text(const std::vector<int64_t>& shape);
/// "dim 1: 0-4, 8-12" (ends exclusive); "" for all of a tensor.
std::string part_text(const TensorPart& part);

/// The reason why `part` is invalid: a dim that `shape` does not have, intervals that are outside of it, empty or out
/// of order. "" for a valid one. All other functions require a valid part.
std::string part_problem(const TensorPart& part);

/// The same elements, written in one way only: intervals that touch are one, and all of a dim is no cut.
TensorPart canonical(TensorPart part);

/// Shape of the rank's tensor: `part.shape` with the intervals' sizes added up in place of `dim`.
std::vector<int64_t> local_shape(const TensorPart& part);
int64_t local_numel(const TensorPart& part);

/// The indices of `from` that are not in `taken`; both ascend.
std::vector<Interval> without(const std::vector<Interval>& from, const std::vector<Interval>& taken);

/// The elements of `parts[rank]` that no earlier part has; a part without intervals if there are none.
///
/// Requires  parts of one tensor, cut along one dim where they are cut.
TensorPart first_held(const std::vector<TensorPart>& parts, int rank);

/// `count` ranges of `length` elements that two flattenings share: range i begins at a + i * a_stride in the one
/// and at b + i * b_stride in the other. Both ascend.
struct PartRun {
  int64_t a = 0;
  int64_t b = 0;
  int64_t length = 0;
  int64_t count = 1;
  int64_t a_stride = 0;
  int64_t b_stride = 0;

  int64_t numel() const { return length * count; }
  int64_t a_end() const { return a + (count - 1) * a_stride + length; }
  bool operator==(const PartRun&) const = default;
};

/// The elements that are in both parts, each in one run, with their places in the row-major flattenings of both.
///
/// Requires  a.shape == b.shape.
/// Cost      one run for each pair of intervals that meet, however many rows they have; where the dims differ, one for
///           each index of the dims before both.
std::vector<PartRun> intersect(const TensorPart& a, const TensorPart& b);

/// The elements of `run` with places in `a_range` and `b_range`; at most three runs, of which only one has a count
/// above 1.
std::vector<PartRun> clip(const PartRun& run, const Interval& a_range, const Interval& b_range);

/// Places of the elements that are in `some`, too, in the row-major flattening of `part`; ascending.
///
/// Requires  as intersect().
std::vector<Interval> places_in(const TensorPart& part, const TensorPart& some);

}  // namespace trireme
