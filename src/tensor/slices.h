// How one dim of a tensor is cut over the ranks of a tensor group, and what views make of it. Pure arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "trireme/base/tensor_part.h"

namespace trireme::tensor {

/// Indices of a dim of `whole` elements by rank: each rank's intervals ascend and stand one behind the other in its
/// slice. Ranks that share a key/value head have it each.
struct RankSlices {
  int64_t whole = 0;
  std::vector<std::vector<Interval>> of_rank;

  int64_t local(int rank) const;
  bool operator==(const RankSlices&) const = default;
  /// Whether some element is on several ranks.
  bool overlaps() const;
  /// The elements of rank `rank` that no rank before it has.
  std::vector<Interval> first_of(int rank) const;
  /// The place of index `of_whole` in rank `rank`'s slice; nullopt: it is not there.
  std::optional<int64_t> place_of(int64_t of_whole, int rank) const;
  /// Each index stands for `factor` indices.
  RankSlices times(int64_t factor) const;
  /// Every `factor` indices become one. Nothing: some slice begins or ends between them.
  std::optional<RankSlices> over(int64_t factor) const;
  /// One of the `blocks` equal stretches of the dim. Nothing: ranks do not have the same of each.
  std::optional<RankSlices> of_each(int64_t blocks) const;
  /// The ranks' parts of [begin, end). Nullopt: some rank has none of it.
  std::optional<RankSlices> within(int64_t begin, int64_t end) const;
  /// Where the elements of [begin, end) that rank `rank` has are in its slice.
  Interval local_range(int64_t begin, int64_t end, int rank) const;
};

/// The dim of an activation or parameter that is cut.
struct DimCut {
  int64_t dim = 0;
  /// The dim's size is outer * slices->whole: it was flattened with dims before it.
  int64_t outer = 1;
  std::shared_ptr<const RankSlices> slices;

  int64_t whole_size() const { return outer * slices->whole; }
  int64_t local_size(int rank) const { return outer * slices->local(rank); }
  bool has_same_slices(const DimCut& other) const {
    return outer == other.outer && (slices == other.slices || *slices == *other.slices);
  }
};

/// `cut` of a tensor of the whole sizes `from` after a view of the whole sizes `to`. Nothing: the view cuts through
/// slices.
std::optional<DimCut> cut_of_view(const std::vector<int64_t>& from, const DimCut& cut, const std::vector<int64_t>& to);

/// `sizes` with the value of its -1, if there is one. Nothing: they are not sizes of `numel` elements.
std::optional<std::vector<int64_t>> resolved_sizes(std::vector<int64_t> sizes, int64_t numel);

}  // namespace trireme::tensor
