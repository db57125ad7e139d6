#include "trireme/activations/decide.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>

namespace trireme {
namespace {

using ByPosition = std::vector<FactorCut>;

/// A factor that arguments are cut along, and how many elements these have.
struct Vote {
  uint8_t factor = 0;
  int lead = 0;
  int64_t elements = 0;
  ByPosition cuts = {};
};

/// The intervals of `of`, local indices of what `owned` says, in the whole's indices.
std::vector<Interval> within(const std::vector<Interval>& owned, const std::vector<Interval>& of) {
  std::vector<Interval> found;
  for (const Interval& some : of) {
    int64_t before = 0;
    for (const Interval& one : owned) {
      const int64_t begin = std::max(some.begin - before, int64_t{0});
      const int64_t end = std::min(some.end - before, one.size());
      if (begin < end) found.push_back({one.begin + begin, one.begin + end});
      before += one.size();
    }
  }
  return found;
}

/// Gives the row of a position its part of a factor.
void divide(LocalRow& local, uint8_t factor, const FactorCut& cut, int rank) {
  std::vector<Interval> own;
  for (int64_t stretch = 0; stretch < cut.times; ++stretch)
    for (const Interval& one : cut.ranges->of_rank(rank))
      own.push_back({stretch * cut.ranges->whole() + one.begin, stretch * cut.ranges->whole() + one.end});
  local.owned[factor] = within(local.owned[factor], own);
  local.sizes[factor] = cut.times * cut.ranges->local(rank);
}

/// The ranges of a factor that is made of pieces of others.
Ranges ranges_of(const std::vector<Piece>& pieces, const std::map<uint8_t, FactorCut>& chosen, int ranks) {
  std::vector<std::vector<Interval>> of_rank(ranks);
  int64_t at = 0;
  for (const Piece& piece : pieces) {
    const int64_t size = piece.end - piece.begin;
    for (int rank = 0; rank < ranks; ++rank)
      for (const Interval& one : clipped(chosen.at(piece.factor).ranges->of_rank(rank), piece.begin, piece.end))
        of_rank[rank].push_back(piece.is_reversed ? Interval{at + size - one.end, at + size - one.begin}
                                                  : Interval{at + one.begin, at + one.end});
    at += size;
  }
  return {at, std::move(of_rank)};
}

class Decider {
 public:
  Decider(const Row& row, const std::vector<Placement>& arguments, const AxisGrid& grid, const std::vector<int>& leads)
      : row_(row), given_(arguments), grid_(grid), leads_(leads) {
    const Placement whole(grid.positions());
    made_.arguments.assign(row.arguments.size(), whole);
    made_.results.assign(row.results.size(), whole);
    made_.local.assign(grid.positions(), LocalRow(row));
  }

  Decision run() && {
    for (int axis = 0; axis < grid_.axes(); ++axis)
      for (const Vote& vote : votes(axis))
        if (choose(axis, vote)) break;
    return std::move(made_);
  }

 private:
  /// Those of an axis, the best one first: those of what leads, then factors that pass through, then those with the
  /// most elements.
  std::vector<Vote> votes(int axis) {
    std::vector<Vote> all;
    for (size_t i = 0; i < given_.size(); ++i) {
      std::optional<Vote> vote = vote_of(axis, i);
      if (!vote || std::ranges::any_of(all, [&](const Vote& one) { return one.factor == vote->factor; })) continue;
      all.push_back(std::move(*vote));
    }
    const auto is_reduced = [this](const Vote& vote) { return row_.factors[vote.factor].kind != FactorKind::kEach; };
    std::ranges::stable_sort(all, [&](const Vote& one, const Vote& other) {
      return std::tuple(-one.lead, is_reduced(one), -one.elements) <
             std::tuple(-other.lead, is_reduced(other), -other.elements);
    });
    voted_.clear();
    for (const Vote& vote : all) voted_.emplace(vote.factor, vote.cuts);
    return all;
  }

  /// Nothing: the argument is not cut along the axis, or at some position along no single factor, or along one that is
  /// mixed.
  std::optional<Vote> vote_of(int axis, size_t argument) const {
    const TensorFactors& dims = row_.arguments[argument];
    Vote vote{.lead = leads_.empty() ? 0 : leads_[argument], .elements = 1};
    for (const int64_t size : row_.sizes_of(dims)) vote.elements *= size;
    for (int position = 0; position < grid_.positions(); ++position) {
      std::optional<std::pair<uint8_t, FactorCut>> found;
      for (const Cut& cut : given_[argument].at(position))
        if (cut.axis == axis) found = along(dims[cut.dim], made_.local[position].sizes, cut);
      if (!found || (position > 0 && found->first != vote.factor)) return std::nullopt;
      vote.factor = found->first;
      vote.cuts.push_back(std::move(found->second));
    }
    if (row_.factors[vote.factor].kind == FactorKind::kWhole) return std::nullopt;
    return vote;
  }

  /// The factors of results that `factor` is a piece of.
  std::vector<uint8_t> linked_to(uint8_t factor) const {
    std::vector<uint8_t> linked;
    for (const PiecedFactor& one : row_.pieces)
      if (std::ranges::any_of(one.pieces, [factor](const Piece& piece) { return piece.factor == factor; }))
        linked.push_back(one.factor);
    return linked;
  }

  bool is_in_a_result(uint8_t factor) const {
    for (const TensorFactors& result : row_.results)
      for (const DimFactors& dim : result)
        if (std::ranges::count(dim, factor) > 0) return true;
    return false;
  }

  /// Divides the factor of `vote` over the axis; false: it cannot be.
  bool choose(int axis, const Vote& vote) {
    const FactorKind kind = row_.factors[vote.factor].kind;
    const std::vector<uint8_t> linked = linked_to(vote.factor);
    if (linked.empty() && kind == FactorKind::kEach && !is_in_a_result(vote.factor)) return false;
    // Elements that several ranks have would count several times.
    const auto overlaps = [](const FactorCut& cut) { return cut.ranges->overlaps(); };
    if (kind != FactorKind::kEach && std::ranges::any_of(vote.cuts, overlaps)) return false;
    std::set<uint8_t> joined{vote.factor};  // what goes into one dim with it
    for (const uint8_t factor : linked)
      for (const Piece& piece : *row_.pieces_of(factor)) joined.insert(piece.factor);
    std::vector<std::map<uint8_t, FactorCut>> chosen(grid_.positions()), of_linked(grid_.positions());
    for (int position = 0; position < grid_.positions(); ++position) {
      for (const uint8_t factor : joined) chosen[position].emplace(factor, cut_of(axis, factor, position));
      if (!linked.empty())
        for (const auto& [factor, cut] : chosen[position])
          if (cut.times != 1) return false;
      for (const uint8_t factor : linked)
        of_linked[position].emplace(
            factor, FactorCut{1, ranges_of(pieces_here(position, factor), chosen[position], grid_.ranks(axis))});
      if (leaves_none(chosen[position].at(vote.factor)) && !(linked.empty() && may_be_empty(kind))) return false;
      for (const auto& [factor, cut] : of_linked[position])
        if (leaves_none(cut)) return false;
    }
    made_.divided.push_back(axis);
    if (kind != FactorKind::kEach) made_.joins.push_back({axis, kind, shares(axis, vote.factor, chosen)});
    for (int position = 0; position < grid_.positions(); ++position)
      take(axis, position, chosen[position], of_linked[position]);
    return true;
  }

  FactorCut cut_of(int axis, uint8_t factor, int position) const {
    if (const auto found = voted_.find(factor); found != voted_.end()) return found->second[position];
    return {1, Ranges::even(made_.local[position].sizes[factor], grid_.ranks(axis))};
  }

  const std::vector<Piece>& pieces_here(int position, uint8_t factor) const {
    return std::ranges::find(made_.local[position].pieces, factor, &PiecedFactor::factor)->pieces;
  }

  /// Whether a rank may have no element: a mask has taken none of its own.
  static bool may_be_empty(FactorKind kind) {
    return kind == FactorKind::kEach || kind == FactorKind::kSum || kind == FactorKind::kMean;
  }

  static bool leaves_none(const FactorCut& cut) {
    for (int rank = 0; rank < cut.ranges->ranks(); ++rank)
      if (cut.ranges->of_rank(rank).empty()) return true;
    return false;
  }

  std::vector<double> shares(int axis, uint8_t factor, const std::vector<std::map<uint8_t, FactorCut>>& chosen) const {
    std::vector<double> shares;
    for (int position = 0; position < grid_.positions(); ++position) {
      const FactorCut& cut = chosen[position].at(factor);
      shares.push_back(static_cast<double>(cut.times * cut.ranges->local(grid_.rank(position, axis))) /
                       static_cast<double>(made_.local[position].sizes[factor]));
    }
    return shares;
  }

  /// Notes the cuts of arguments and results at a position, and what it has of the factors from now on.
  void take(int axis, int position, const std::map<uint8_t, FactorCut>& chosen,
            const std::map<uint8_t, FactorCut>& of_linked) {
    LocalRow& local = made_.local[position];
    const auto note = [&](Placement& placement, const TensorFactors& dims, const std::map<uint8_t, FactorCut>& cuts) {
      for (const auto& [factor, cut] : cuts)
        if (const std::optional<Cut> found = cut_by(axis, dims, local.sizes, factor, cut))
          placement.at(position).push_back(*found);
    };
    for (size_t i = 0; i < row_.arguments.size(); ++i) note(made_.arguments[i], row_.arguments[i], chosen);
    for (size_t i = 0; i < row_.results.size(); ++i) {
      note(made_.results[i], row_.results[i], chosen);
      note(made_.results[i], row_.results[i], of_linked);
    }
    const int rank = grid_.rank(position, axis);
    for (PiecedFactor& one : local.pieces)
      if (of_linked.contains(one.factor))
        for (Piece& piece : one.pieces) {
          const Interval place = chosen.at(piece.factor).ranges->place_of(rank, {piece.begin, piece.end});
          piece.begin = place.begin;
          piece.end = place.end;
        }
    for (const auto& [factor, cut] : chosen) divide(local, factor, cut, rank);
    for (const auto& [factor, cut] : of_linked) divide(local, factor, cut, rank);
  }

  const Row& row_;
  const std::vector<Placement>& given_;
  const AxisGrid& grid_;
  const std::vector<int>& leads_;
  std::map<uint8_t, ByPosition> voted_;  ///< of the axis at hand
  Decision made_;
};

}  // namespace

Decision decide(const Row& row, const std::vector<Placement>& arguments, const AxisGrid& grid,
                const std::vector<int>& leads) {
  return Decider(row, arguments, grid, leads).run();
}

}  // namespace trireme
