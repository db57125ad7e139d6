#include "tensor/slices.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace trireme::tensor {
namespace {

using Intervals = std::vector<Interval>;

int64_t size_of(const Intervals& intervals) {
  return std::accumulate(intervals.begin(), intervals.end(), int64_t{0},
                         [](int64_t sum, const Interval& one) { return sum + one.size(); });
}

/// Adds `one` behind the others; neighbours become one.
void append(Intervals& to, const Interval& one) {
  if (one.size() <= 0) return;
  if (!to.empty() && to.back().end == one.begin)
    to.back().end = one.end;
  else
    to.push_back(one);
}

Intervals clipped(const Intervals& intervals, int64_t begin, int64_t end) {
  Intervals result;
  for (const Interval& one : intervals)
    append(result, {std::max(one.begin, begin) - begin, std::min(one.end, end) - begin});
  return result;
}

RankSlices each(const RankSlices& slices, int64_t whole, const std::function<Intervals(const Intervals&)>& change) {
  RankSlices result{.whole = whole, .of_rank = {}};
  for (const Intervals& one : slices.of_rank) result.of_rank.push_back(change(one));
  return result;
}

}  // namespace

int64_t RankSlices::local(int rank) const { return size_of(of_rank[static_cast<size_t>(rank)]); }

bool RankSlices::overlaps() const {
  int64_t held = 0;
  for (const Intervals& one : of_rank) held += size_of(one);
  return held > whole;
}

std::vector<Interval> RankSlices::first_of(int rank) const {
  Intervals left = of_rank[static_cast<size_t>(rank)];
  for (int before = 0; before < rank; ++before) left = without(left, of_rank[static_cast<size_t>(before)]);
  return left;
}

std::optional<int64_t> RankSlices::place_of(int64_t of_whole, int rank) const {
  int64_t before = 0;
  for (const Interval& one : of_rank[static_cast<size_t>(rank)]) {
    if (of_whole >= one.begin && of_whole < one.end) return before + of_whole - one.begin;
    before += one.size();
  }
  return {};
}

RankSlices RankSlices::times(int64_t factor) const {
  return each(*this, whole * factor, [&](const Intervals& intervals) {
    Intervals result;
    for (const Interval& one : intervals) result.push_back({one.begin * factor, one.end * factor});
    return result;
  });
}

std::optional<RankSlices> RankSlices::over(int64_t factor) const {
  if (factor <= 0 || whole % factor != 0) return {};
  for (const Intervals& intervals : of_rank)
    for (const Interval& one : intervals)
      if (one.begin % factor != 0 || one.end % factor != 0) return {};
  return each(*this, whole / factor, [&](const Intervals& intervals) {
    Intervals result;
    for (const Interval& one : intervals) result.push_back({one.begin / factor, one.end / factor});
    return result;
  });
}

std::optional<RankSlices> RankSlices::of_each(int64_t blocks) const {
  if (blocks <= 0 || whole % blocks != 0) return {};
  const int64_t size = whole / blocks;
  for (const Intervals& intervals : of_rank)
    for (int64_t block = 1; block < blocks; ++block)
      if (clipped(intervals, block * size, (block + 1) * size) != clipped(intervals, 0, size)) return {};
  return each(*this, size, [&](const Intervals& intervals) { return clipped(intervals, 0, size); });
}

std::optional<RankSlices> RankSlices::within(int64_t begin, int64_t end) const {
  RankSlices result =
      each(*this, end - begin, [&](const Intervals& intervals) { return clipped(intervals, begin, end); });
  for (const Intervals& one : result.of_rank)
    if (one.empty()) return {};
  return result;
}

Interval RankSlices::local_range(int64_t begin, int64_t end, int rank) const {
  const Intervals& own = of_rank[static_cast<size_t>(rank)];
  const int64_t before = size_of(clipped(own, 0, begin));
  return {before, before + size_of(clipped(own, begin, end))};
}

std::optional<std::vector<int64_t>> resolved_sizes(std::vector<int64_t> sizes, int64_t numel) {
  int64_t product = 1;
  int64_t* open = nullptr;
  for (int64_t& size : sizes) {
    if (size == -1 && open == nullptr) {
      open = &size;
      continue;
    }
    if (size < 0) return {};
    product *= size;
  }
  if (open != nullptr) {
    if (product == 0 || numel % product != 0) return {};
    *open = numel / product;
    return sizes;
  }
  if (product != numel) return {};
  return sizes;
}

/// An element's place in a dim that is cut is o * whole + t, of `outer` stretches o; `inner` elements lie behind it.
/// The new dims divide the places anew: one of them holds what ranks have parts of.
std::optional<DimCut> cut_of_view(const std::vector<int64_t>& from, const DimCut& cut, const std::vector<int64_t>& to) {
  if (std::find(to.begin(), to.end(), 0) != to.end()) return {};
  int64_t inner = 1;
  for (size_t dim = static_cast<size_t>(cut.dim) + 1; dim < from.size(); ++dim) inner *= from[dim];
  const int64_t top = inner * cut.whole_size();
  struct Piece {
    int64_t dim, size;
    int64_t above, below;  ///< elements of the same new dim before and behind those of the old one
  };
  std::vector<Piece> pieces;
  int64_t stride = 1;
  for (size_t i = to.size(); i-- > 0; stride *= to[i]) {
    const int64_t begin = std::max(stride, inner), end = std::min(stride * to[i], top);
    if (begin >= end) continue;
    if (end % begin != 0 || begin % stride != 0 || (stride * to[i]) % end != 0) return {};
    pieces.push_back({static_cast<int64_t>(i), end / begin, stride * to[i] / end, begin / stride});
  }
  std::reverse(pieces.begin(), pieces.end());
  int64_t before = 1, behind = cut.whole_size();
  for (const Piece& piece : pieces) {
    behind /= piece.size;
    std::optional<RankSlices> slices;
    int64_t outer = 1;
    if (before % cut.outer == 0) {  // the stretches are dims before this one
      slices = cut.slices->of_each(before / cut.outer);
    } else if (cut.outer % before == 0 && cut.slices->whole % behind == 0) {
      outer = cut.outer / before;
      slices = *cut.slices;
    }
    if (slices) slices = slices->over(behind);
    before *= piece.size;
    if (!slices || outer * slices->whole != piece.size) continue;
    const bool is_whole = std::all_of(slices->of_rank.begin(), slices->of_rank.end(), [&](const Intervals& one) {
      return one == Intervals{{0, slices->whole}};
    });
    if (is_whole) continue;
    return DimCut{.dim = piece.dim,
                  .outer = outer * piece.above,
                  .slices = std::make_shared<RankSlices>(piece.below == 1 ? *slices : slices->times(piece.below))};
  }
  return {};
}

}  // namespace trireme::tensor
