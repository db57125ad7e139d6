#include "trireme/activations/placement.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>

namespace trireme {
namespace {

/// Ascending, none empty, those that touch as one.
std::vector<Interval> joined(std::vector<Interval> intervals) {
  std::ranges::sort(intervals, {}, &Interval::begin);
  std::vector<Interval> found;
  for (const Interval& one : intervals) {
    if (one.size() <= 0) continue;
    if (!found.empty() && found.back().end == one.begin)
      found.back().end = one.end;
    else
      found.push_back(one);
  }
  return found;
}

int64_t count(const std::vector<Interval>& intervals) {
  int64_t sum = 0;
  for (const Interval& one : intervals) sum += one.size();
  return sum;
}

}  // namespace

std::vector<Interval> clipped(const std::vector<Interval>& intervals, int64_t begin, int64_t end) {
  std::vector<Interval> found;
  for (const Interval& one : intervals)
    found.push_back({std::max(one.begin, begin) - begin, std::min(one.end, end) - begin});
  return joined(std::move(found));
}

// --- ranges ---

Ranges::Ranges(int64_t whole, std::vector<std::vector<Interval>> of_rank)
    : whole_(whole), of_rank_(std::move(of_rank)) {
  for (std::vector<Interval>& one : of_rank_) {
    std::erase_if(one, [](const Interval& interval) { return interval.size() <= 0; });
    std::ranges::sort(one, {}, &Interval::begin);
  }
}

Ranges Ranges::even(int64_t whole, int ranks) {
  std::vector<std::vector<Interval>> of_rank;
  for (int64_t rank = 0; rank < ranks; ++rank) of_rank.push_back({{whole * rank / ranks, whole * (rank + 1) / ranks}});
  return {whole, std::move(of_rank)};
}

template <class Change>
Ranges Ranges::changed(int64_t whole, const Change& change) const {
  std::vector<std::vector<Interval>> of_rank;
  for (const std::vector<Interval>& one : of_rank_) of_rank.push_back(change(one));
  return {whole, std::move(of_rank)};
}

int64_t Ranges::local(int rank) const { return count(of_rank_[rank]); }

bool Ranges::is_whole_everywhere() const {
  return std::ranges::all_of(of_rank_, [this](const auto& one) {
    return joined(one) == std::vector<Interval>{{0, whole_}};
  });
}

bool Ranges::operator==(const Ranges& other) const {
  return whole_ == other.whole_ && std::ranges::equal(of_rank_, other.of_rank_, [](const auto& one, const auto& two) {
           return one == two || joined(one) == joined(two);
         });
}

bool Ranges::overlaps() const {
  int64_t held = 0;
  for (const std::vector<Interval>& one : of_rank_) held += count(one);
  return held > whole_;
}

std::vector<Interval> Ranges::first_of(int rank) const {
  std::vector<Interval> left = of_rank_[rank];
  for (int before = 0; before < rank; ++before) left = without(left, of_rank_[before]);
  return left;
}

Ranges Ranges::times(int64_t n) const {
  return changed(whole_ * n, [n](std::vector<Interval> one) {
    for (Interval& interval : one) interval = {interval.begin * n, interval.end * n};
    return one;
  });
}

std::optional<Ranges> Ranges::over(int64_t n) const {
  if (whole_ % n != 0) return std::nullopt;
  for (const std::vector<Interval>& one : of_rank_)
    for (const Interval& interval : one)
      if (interval.begin % n != 0 || interval.end % n != 0) return std::nullopt;
  return changed(whole_ / n, [n](std::vector<Interval> one) {
    for (Interval& interval : one) interval = {interval.begin / n, interval.end / n};
    return one;
  });
}

std::optional<Ranges> Ranges::of_each(int64_t n) const {
  if (whole_ % n != 0) return std::nullopt;
  const int64_t size = whole_ / n;
  for (const std::vector<Interval>& one : of_rank_)
    for (int64_t i = 1; i < n; ++i)
      if (clipped(one, i * size, (i + 1) * size) != clipped(one, 0, size)) return std::nullopt;
  return changed(size, [size](const std::vector<Interval>& one) { return clipped(one, 0, size); });
}

Interval Ranges::place_of(int rank, Interval some) const {
  const int64_t before = count(clipped(of_rank_[rank], 0, some.begin));
  return {before, before + count(clipped(of_rank_[rank], some.begin, some.end))};
}

std::optional<int64_t> Ranges::find(int rank, int64_t i) const {
  const Interval place = place_of(rank, {i, i + 1});
  return place.size() == 1 ? std::optional(place.begin) : std::nullopt;
}

// --- cuts ---

at::Tensor Cut::index_of(int rank) const {
  std::vector<at::Tensor> own{at::arange(0, at::kLong)};
  for (int64_t stretch = 0; stretch < outer; ++stretch)
    for (const Interval& one : ranges->of_rank(rank))
      own.push_back(at::arange(stretch * ranges->whole() + one.begin, stretch * ranges->whole() + one.end, at::kLong));
  return at::cat(own);
}

at::Tensor Cut::slice(const at::Tensor& tensor, int rank) const { return tensor.index_select(dim, index_of(rank)); }

int AxisGrid::positions() const {
  int count = 1;
  for (const int ranks : ranks_) count *= ranks;
  return count;
}

int AxisGrid::rank(int position, int axis) const {
  for (int later = axes() - 1; later > axis; --later) position /= ranks_[later];
  return position % ranks_[axis];
}

std::vector<int> AxisGrid::along(int position, int axis) const {
  int stride = 1;
  for (int later = axis + 1; later < axes(); ++later) stride *= ranks_[later];
  std::vector<int> found;
  for (int other = 0; other < ranks_[axis]; ++other)
    found.push_back(position + (other - rank(position, axis)) * stride);
  return found;
}

bool Placement::is_cut_along(int axis) const {
  return std::ranges::any_of(cuts_.front(), [axis](const Cut& cut) { return cut.axis == axis; });
}

bool Placement::overlaps() const {
  const auto has_overlaps = [](const Cut& cut) { return cut.ranges->overlaps(); };
  return std::ranges::any_of(cuts_, [&](const Cuts& cuts) { return std::ranges::any_of(cuts, has_overlaps); });
}

// --- from dim to factor and back ---

std::optional<std::pair<uint8_t, FactorCut>> along(const DimFactors& dim, c10::ArrayRef<int64_t> sizes,
                                                   const Cut& cut) {
  int64_t before = 1, behind = 1;
  for (const uint8_t factor : dim) behind *= sizes[factor];
  if (behind != cut.outer * cut.ranges->whole()) return std::nullopt;
  for (const uint8_t factor : dim) {
    behind /= sizes[factor];
    FactorCut found;
    if (before % cut.outer == 0) {
      found.ranges = cut.ranges->of_each(before / cut.outer);
    } else if (cut.outer % before == 0) {
      found = {cut.outer / before, *cut.ranges};
    }
    before *= sizes[factor];
    if (found.ranges) found.ranges = found.ranges->over(behind);
    if (found.ranges && found.times * found.ranges->whole() == sizes[factor] && !found.ranges->is_whole_everywhere())
      return std::pair(factor, std::move(found));
  }
  return std::nullopt;
}

std::optional<Cut> cut_by(int axis, const TensorFactors& tensor, c10::ArrayRef<int64_t> sizes, uint8_t factor,
                          const FactorCut& cut) {
  for (size_t d = 0; d < tensor.size(); ++d) {
    const auto found = std::ranges::find(tensor[d], factor);
    if (found == tensor[d].end()) continue;
    int64_t before = 1, behind = 1;
    for (auto it = tensor[d].begin(); it != found; ++it) before *= sizes[*it];
    for (auto it = found + 1; it != tensor[d].end(); ++it) behind *= sizes[*it];
    return Cut{axis, static_cast<int64_t>(d), before * cut.times,
               std::make_shared<const Ranges>(cut.ranges->times(behind))};
  }
  return std::nullopt;
}

}  // namespace trireme
