// How a tensor is cut over axes of ranks: which elements of the whole each rank has.
//
// The main idea: a cut says intervals of indices by rank, so that uneven parts, packed dims, shared heads and selected
// tokens need no padding and no word of their own. Pure arithmetic, alike on all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "trireme/base/tensor_part.h"
#include "trireme/operators/row.h"

namespace trireme {

/// Ascending intervals of [0, whole) by rank; they stand behind one another in the rank's part. Empty ones are none.
/// Two that touch mean one, and stay apart: they may be sections of a packed dim, which a program speaks of.
class Ranges {
 public:
  Ranges(int64_t whole, std::vector<std::vector<Interval>> of_rank);
  /// Parts of equal size, up to one.
  static Ranges even(int64_t whole, int ranks);

  int64_t whole() const { return whole_; }
  int ranks() const { return static_cast<int>(of_rank_.size()); }
  const std::vector<Interval>& of_rank(int rank) const { return of_rank_[rank]; }
  /// Number of indices that a rank has.
  int64_t local(int rank) const;
  bool is_whole_everywhere() const;
  /// Whether some element is on several ranks.
  bool overlaps() const;
  /// The elements of a rank that no rank before it has.
  std::vector<Interval> first_of(int rank) const;
  /// Each index becomes n.
  Ranges times(int64_t n) const;
  /// Every n indices become one; nothing: some interval begins or ends between them.
  std::optional<Ranges> over(int64_t n) const;
  /// One of n equal stretches; nothing: a rank does not have the same of each.
  std::optional<Ranges> of_each(int64_t n) const;
  /// Where a rank's indices of `some` are in its part.
  Interval place_of(int rank, Interval some) const;
  /// Where index `i` of the whole is in a rank's part; nothing: it is not there.
  std::optional<int64_t> find(int rank, int64_t i) const;
  bool operator==(const Ranges& other) const;

 private:
  template <class Change>
  Ranges changed(int64_t whole, const Change& change) const;

  int64_t whole_;
  std::vector<std::vector<Interval>> of_rank_;
};

/// Intervals of an index space, within [begin, end) and counted from there.
std::vector<Interval> clipped(const std::vector<Interval>& intervals, int64_t begin, int64_t end);

/// Dim `dim`, as earlier cuts leave it, is `outer` stretches of `ranges->whole()` elements, each cut alike.
struct Cut {
  int axis = 0;
  int64_t dim = 0;
  int64_t outer = 1;
  std::shared_ptr<const Ranges> ranges;

  /// A rank's indices of the dim: int64.
  at::Tensor index_of(int rank) const;
  /// This rank's part of a tensor.
  at::Tensor slice(const at::Tensor& tensor, int rank) const;
  int64_t local(int rank) const { return outer * ranges->local(rank); }
  int64_t whole() const { return outer * ranges->whole(); }
  /// Whether ranks have the same elements of a dim by both.
  bool has_same_ranges(const Cut& other) const {
    return outer == other.outer && (ranges == other.ranges || *ranges == *other.ranges);
  }
  bool operator==(const Cut& other) const { return axis == other.axis && dim == other.dim && has_same_ranges(other); }
};

/// Ranks along several axes; a position is a rank's number in the whole grid, the last axis the fastest.
class AxisGrid {
 public:
  explicit AxisGrid(std::vector<int> ranks) : ranks_(std::move(ranks)) {}
  int axes() const { return static_cast<int>(ranks_.size()); }
  int ranks(int axis) const { return ranks_[axis]; }
  int positions() const;
  /// The rank along an axis of a position.
  int rank(int position, int axis) const;
  /// The positions that differ from this one along `axis` alone, by their rank along it.
  std::vector<int> along(int position, int axis) const;

 private:
  std::vector<int> ranks_;
};

/// The cuts of a tensor, by position: one axis may cut what another one leaves, by other ranges at each of its ranks. A
/// later cut counts in what earlier ones leave; at most one for each axis.
class Placement {
 public:
  using Cuts = c10::SmallVector<Cut, 2>;
  /// Whole everywhere.
  explicit Placement(int positions) : cuts_(positions) {}
  const Cuts& at(int position) const { return cuts_[position]; }
  Cuts& at(int position) { return cuts_[position]; }
  auto begin() { return cuts_.begin(); }
  auto end() { return cuts_.end(); }
  auto begin() const { return cuts_.begin(); }
  auto end() const { return cuts_.end(); }
  bool is_cut_along(int axis) const;
  /// Whether some ranks have the same elements by a cut.
  bool overlaps() const;
  bool operator==(const Placement&) const = default;

 private:
  std::vector<Cuts> cuts_;
};

/// A cut of one factor: in how many stretches of it, by which ranges.
struct FactorCut {
  int64_t times = 1;
  std::optional<Ranges> ranges;
};

/// The factor of a dim that `cut` runs along, and how; nothing: along no single one. `sizes`: of the factors, as
/// earlier cuts leave them.
std::optional<std::pair<uint8_t, FactorCut>> along(const DimFactors& dim, c10::ArrayRef<int64_t> sizes, const Cut& cut);

/// The inverse: the cut of a tensor with these dims along a factor; nothing: it does not have it.
std::optional<Cut> cut_by(int axis, const TensorFactors& tensor, c10::ArrayRef<int64_t> sizes, uint8_t factor,
                          const FactorCut& cut);

}  // namespace trireme
