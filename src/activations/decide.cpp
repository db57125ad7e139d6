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
/// Cuts of factors at a position.
using Chosen = std::map<uint8_t, FactorCut>;

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
Ranges ranges_of(const std::vector<Piece>& pieces, const Chosen& chosen, int ranks) {
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

/// The source's elements of stretch [begin, end) of a piece.
Interval of_piece(const Piece& piece, int64_t begin, int64_t end) {
  return piece.is_reversed ? Interval{piece.end - end, piece.end - begin}
                           : Interval{piece.begin + begin, piece.begin + end};
}

int64_t elements(const TensorFactors& dims, const LocalRow& local) {
  int64_t count = 1;
  for (const int64_t size : local.sizes_of(dims)) count *= size;
  return count;
}
bool has(const TensorFactors& tensor, uint8_t factor) {
  return std::ranges::any_of(tensor, [factor](const DimFactors& dim) { return std::ranges::count(dim, factor) > 0; });
}

/// Factors of which some position has fewer elements than there are ranks. None: together these have as many as ranks,
/// and would be a large part of the whole.
std::vector<uint8_t> few_of(const std::vector<uint8_t>& factors, const std::vector<LocalRow>& positions, int ranks) {
  std::set<uint8_t> found;
  for (const LocalRow& local : positions) {
    int64_t count = 0;
    for (const uint8_t factor : factors) {
      if (local.sizes[factor] >= ranks) continue;
      count += local.sizes[factor];
      found.insert(factor);
    }
    if (count >= ranks) return {};
  }
  return {found.begin(), found.end()};
}

/// Whether each cut is one of what earlier ones leave.
bool fits(const Placement& placement, const std::vector<int64_t>& sizes, const AxisGrid& grid) {
  for (int position = 0; position < grid.positions(); ++position) {
    std::vector<int64_t> left = sizes;
    for (const Cut& cut : placement.at(position)) {
      if (left[cut.dim] != cut.whole()) return false;
      left[cut.dim] = cut.local(grid.rank(position, cut.axis));
    }
  }
  return true;
}

class Decider {
 public:
  Decider(const Row& row, const std::vector<Placement>& arguments, const AxisGrid& grid, const std::vector<int>& leads,
          const std::vector<Undivided>& undivided)
      : row_(row), given_(arguments), grid_(grid), leads_(leads), undivided_(undivided) {
    const Placement whole(grid.positions());
    made_.arguments.assign(row.arguments.size(), whole);
    made_.results.assign(row.results.size(), whole);
    made_.local.assign(grid.positions(), LocalRow(row));
  }

  Decision run() && {
    for (int axis = 0; axis < grid_.axes(); ++axis) {
      if (moves(axis)) {
        if (!move(axis)) refuse(axis);
        continue;
      }
      for (const Vote& vote : votes(axis))
        if (choose(axis, vote)) break;
    }
    give_back();
    check_steps();
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

  /// The factors that go into one dim with this one.
  std::set<uint8_t> joined_with(uint8_t factor, const std::vector<uint8_t>& linked) const {
    std::set<uint8_t> joined{factor};
    for (const uint8_t result : linked)
      for (const Piece& piece : *row_.pieces_of(result)) joined.insert(piece.factor);
    return joined;
  }

  /// Divides the factor of `vote` over the axis; false: it cannot be.
  bool choose(int axis, const Vote& vote) {
    const std::set<uint8_t> joined = joined_with(vote.factor, linked_to(vote.factor));
    std::vector<Chosen> chosen(grid_.positions());
    for (int position = 0; position < grid_.positions(); ++position)
      for (const uint8_t factor : joined) chosen[position].emplace(factor, cut_of(axis, factor, position));
    return divide_by(axis, vote.factor, std::move(chosen));
  }

  /// Divides `lead` and what goes into one dim with it; false: it cannot be. `few`: factors of results that may leave a
  /// rank none, and then go to every rank.
  bool divide_by(int axis, uint8_t lead, std::vector<Chosen> chosen, const std::vector<uint8_t>& few = {}) {
    const FactorKind kind = row_.factors[lead].kind;
    const std::vector<uint8_t> linked = linked_to(lead);
    if (linked.empty() && kind == FactorKind::kEach && !is_in_a_result(lead)) return false;
    std::vector<Chosen> of_linked(grid_.positions());
    for (int position = 0; position < grid_.positions(); ++position) {
      // Elements that several ranks have would count several times.
      if (kind != FactorKind::kEach && chosen[position].at(lead).ranges->overlaps()) return false;
      if (!linked.empty())
        for (const auto& [factor, cut] : chosen[position])
          if (cut.times != 1) return false;
      for (const uint8_t factor : linked)
        of_linked[position].emplace(
            factor, FactorCut{1, ranges_of(pieces_here(position, factor), chosen[position], grid_.ranks(axis))});
      if (leaves_none(chosen[position].at(lead)) && !(linked.empty() && may_be_empty(kind))) return false;
      for (const auto& [factor, cut] : of_linked[position])
        if (std::ranges::count(few, factor) == 0 && leaves_none(cut)) return false;
    }
    if (moves(axis) && !is_affordable(axis, lead, chosen, of_linked)) return false;
    made_.divided.push_back(axis);
    if (kind != FactorKind::kEach) made_.joins.push_back({axis, kind, shares(axis, lead, chosen)});
    for (int position = 0; position < grid_.positions(); ++position)
      take(axis, position, chosen[position], of_linked[position]);
    for (size_t i = 0; i < row_.results.size(); ++i)
      if (std::ranges::any_of(few, [&](uint8_t factor) { return has(row_.results[i], factor); }))
        back_.push_back({axis, i, std::vector<std::optional<Cut>>(grid_.positions())});
    return true;
  }

  // --- axes that gather small tensors alone ---

  bool moves(int axis) const {
    return !undivided_.empty() && undivided_[axis] == Undivided::kMove &&
           std::ranges::any_of(given_, [axis](const Placement& one) { return one.is_cut_along(axis); });
  }
  /// Whether what becomes whole is small beside what a rank has anyway: arguments that do not have what is divided, and
  /// results that ranks join of arguments that had to move for it.
  bool is_affordable(int axis, uint8_t lead, const std::vector<Chosen>& chosen,
                     const std::vector<Chosen>& of_linked) const {
    const bool is_joined = row_.factors[lead].kind != FactorKind::kEach;
    if (row_.factors[lead].kind == FactorKind::kPlaces && row_.results.size() >= static_cast<size_t>(grid_.ranks(axis)))
      return false;  // each element along the axis as a result of its own: together they are the whole
    for (int position = 0; position < grid_.positions(); ++position) {
      LocalRow divided = made_.local[position];
      for (const auto* const some : {&chosen[position], &of_linked[position]})
        for (const auto& [factor, cut] : *some) divide(divided, factor, cut, grid_.rank(position, axis));
      const auto becomes_whole = [&](size_t argument) {
        return given_[argument].is_cut_along(axis) && std::ranges::none_of(chosen[position], [&](const auto& one) {
                 return has(row_.arguments[argument], one.first);
               });
      };
      int64_t largest = 0, of_results = 0;
      for (const TensorFactors& one : row_.results) of_results += elements(one, divided);
      for (size_t i = 0; i < given_.size(); ++i)
        if (!becomes_whole(i)) largest = std::max(largest, elements(row_.arguments[i], divided));
      bool is_moved = false;
      for (size_t i = 0; i < given_.size(); ++i) {
        if (!given_[i].is_cut_along(axis)) continue;
        is_moved = is_moved || !is_cut_by(axis, i, position, lead);
        if (becomes_whole(i) && elements(row_.arguments[i], made_.local[position]) > std::max(largest, of_results))
          return false;
      }
      if (is_joined && is_moved && of_results > largest) return false;
    }
    return true;
  }
  bool is_cut_by(int axis, size_t argument, int position, uint8_t factor) const {
    for (const Cut& cut : given_[argument].at(position))
      if (cut.axis == axis)
        if (const auto found = along(row_.arguments[argument][cut.dim], made_.local[position].sizes, cut))
          return found->first == factor;
    return false;
  }

  bool move(int axis) {
    const std::vector<Vote> all = votes(axis);
    for (const Vote& vote : all)
      if (choose(axis, vote)) return true;
    const std::vector<uint8_t> pieced = factors_of_pieces(axis);
    for (const uint8_t factor : pieced)
      if (divide_results_evenly(axis, factor)) return true;
    for (const uint8_t factor : pieced)
      if (divide_few(axis, factor)) return true;
    const std::vector<WayBack> back = ways_back(axis);
    for (const uint8_t factor : free_factors(axis)) {
      std::vector<Chosen> chosen(grid_.positions());
      for (int position = 0; position < grid_.positions(); ++position)
        chosen[position].emplace(factor, even(axis, position, factor));
      if (!divide_by(axis, factor, std::move(chosen))) continue;
      back_.insert(back_.end(), back.begin(), back.end());
      return true;
    }
    return is_small(axis);
  }

  FactorCut even(int axis, int position, uint8_t factor) const {
    return {1, Ranges::even(made_.local[position].sizes[factor], grid_.ranks(axis))};
  }

  /// Factors of the dims that arguments are cut along, of which a result has pieces.
  std::vector<uint8_t> factors_of_pieces(int axis) const {
    std::vector<uint8_t> found;
    for (size_t i = 0; i < given_.size(); ++i)
      for (const Cut& cut : given_[i].at(0))
        if (cut.axis == axis)
          for (const uint8_t factor : row_.arguments[i][cut.dim])
            if (!linked_to(factor).empty() && std::ranges::count(found, factor) == 0) found.push_back(factor);
    return found;
  }

  /// Each rank gets an equal share of each result, of the first one first; what no result has is left out. A result of
  /// fewer elements than ranks, as the last of uneven pieces, goes to every rank.
  bool divide_results_evenly(int axis, uint8_t lead) {
    const int ranks = grid_.ranks(axis);
    const std::vector<uint8_t> linked = linked_to(lead);
    const std::vector<uint8_t> few = few_of(linked, made_.local, ranks);
    std::vector<Chosen> chosen(grid_.positions());
    for (int position = 0; position < grid_.positions(); ++position) {
      std::map<uint8_t, std::vector<std::vector<Interval>>> of_factor;
      std::map<uint8_t, std::vector<Interval>> taken;
      for (const uint8_t factor : joined_with(lead, linked)) of_factor[factor].resize(ranks);
      for (const uint8_t result : linked) {
        const Ranges shares = even(axis, position, result).ranges.value();
        for (int rank = 0; rank < ranks; ++rank) {
          int64_t at = 0;
          for (const Piece& piece : pieces_here(position, result)) {
            const int64_t size = piece.end - piece.begin;
            for (const Interval& share : clipped(shares.of_rank(rank), at, at + size))
              for (const Interval& own : without({of_piece(piece, share.begin, share.end)}, taken[piece.factor]))
                of_factor[piece.factor][rank].push_back(own);
            at += size;
          }
        }
        for (auto& [factor, of_rank] : of_factor) {
          std::vector<std::vector<Interval>> all{{}};
          for (const std::vector<Interval>& one : of_rank) all[0].insert(all[0].end(), one.begin(), one.end());
          taken[factor] = clipped(all[0], 0, made_.local[position].sizes[factor]);
        }
      }
      for (auto& [factor, of_rank] : of_factor)
        chosen[position].emplace(factor, FactorCut{1, Ranges(made_.local[position].sizes[factor], std::move(of_rank))});
    }
    return divide_by(axis, lead, std::move(chosen), few);
  }

  /// Results of fewer elements than ranks are computed where these are; then every rank gets them.
  bool divide_few(int axis, uint8_t lead) {
    const std::vector<uint8_t> linked = linked_to(lead);
    std::vector<Chosen> chosen(grid_.positions());
    for (int position = 0; position < grid_.positions(); ++position) {
      int64_t count = 0;
      for (const uint8_t result : linked) count += made_.local[position].sizes[result];
      if (count >= grid_.ranks(axis)) return false;
      for (const uint8_t factor : joined_with(lead, linked))
        chosen[position].emplace(factor, cut_of(axis, factor, position));
    }
    return divide_by(axis, lead, std::move(chosen), linked);
  }

  /// Factors that arguments and results have and nothing mixes, of at least as many elements as ranks. Those of a dim
  /// that is cut come first, as few elements move; then those that divide evenly, then large ones.
  std::vector<uint8_t> free_factors(int axis) const {
    struct Candidate {
      uint8_t factor;
      bool is_cut_by_others, is_of_other_dim;
      double unevenness;
      int64_t size;
    };
    std::vector<Candidate> found;
    const int ranks = grid_.ranks(axis);
    for (uint8_t factor = 0; factor < row_.factors.size(); ++factor) {
      if (row_.factors[factor].kind != FactorKind::kEach || !linked_to(factor).empty() ||
          row_.pieces_of(factor) != nullptr ||
          !std::ranges::all_of(row_.results, [&](const TensorFactors& one) { return has(one, factor); }))
        continue;
      int64_t least = row_.factors[factor].size, most = 0;
      for (const LocalRow& local : made_.local) {
        least = std::min(least, local.sizes[factor]);
        most = std::max(most, local.sizes[factor]);
      }
      if (least < ranks) continue;
      Candidate one{factor, false, true,
                    static_cast<double>((most + ranks - 1) / ranks * ranks) / static_cast<double>(most), most};
      for (size_t i = 0; i < given_.size(); ++i)
        for (const Cut& cut : given_[i].at(0)) {
          if (std::ranges::count(row_.arguments[i][cut.dim], factor) == 0) continue;
          if (cut.axis == axis)
            one.is_of_other_dim = false;
          else
            one.is_cut_by_others = true;
        }
      found.push_back(one);
    }
    std::ranges::stable_sort(found, {}, [](const Candidate& one) {
      return std::tuple(one.is_cut_by_others, one.is_of_other_dim, one.unevenness, -one.size);
    });
    std::vector<uint8_t> factors;
    for (const Candidate& one : found) factors.push_back(one.factor);
    return factors;
  }

  /// A result's cut along an axis in place of the one that the operator gives; by position; nothing: whole.
  struct WayBack {
    int axis;
    size_t result;
    std::vector<std::optional<Cut>> cuts;
  };

  /// To the cuts of arguments, of results that have the dims that these are cut along.
  std::vector<WayBack> ways_back(int axis) const {
    std::vector<WayBack> found;
    for (size_t result = 0; result < row_.results.size(); ++result)
      for (size_t i = 0; i < given_.size(); ++i) {
        WayBack back{axis, result, {}};
        for (int position = 0; position < grid_.positions(); ++position)
          if (std::optional<Cut> cut = cut_as(axis, given_[i].at(position), row_.arguments[i], result))
            back.cuts.push_back(std::move(cut));
        if (back.cuts.size() != static_cast<size_t>(grid_.positions())) continue;
        found.push_back(std::move(back));
        break;
      }
    return found;
  }

  /// The cut of an argument along the axis, of a result that has the dim as it is; nothing: it does not.
  std::optional<Cut> cut_as(int axis, const Placement::Cuts& given, const TensorFactors& argument,
                            size_t result) const {
    for (const Cut& cut : given) {
      if (cut.axis != axis) continue;
      const DimFactors& dim = argument[cut.dim];
      const auto found = std::ranges::find(row_.results[result], dim);
      if (dim.empty() || found == row_.results[result].end()) return std::nullopt;
      Cut of_result = cut;
      of_result.dim = found - row_.results[result].begin();
      return of_result;
    }
    return std::nullopt;
  }

  /// Where another axis cuts what the operator leaves of a dim, the result stays as it is: it is right, too.
  void give_back() {
    made_.returned = made_.results;
    for (auto back = back_.rbegin(); back != back_.rend(); ++back) {
      Placement wanted = made_.returned[back->result];
      for (int position = 0; position < grid_.positions(); ++position) {
        Placement::Cuts& cuts = wanted.at(position);
        auto* at = std::ranges::find_if(cuts, [&](const Cut& one) { return one.axis >= back->axis; });
        if (at != cuts.end() && at->axis == back->axis) at = cuts.erase(at);
        if (back->cuts[position]) cuts.insert(at, *back->cuts[position]);
      }
      const std::vector<Step> steps = steps_between(made_.results[back->result], wanted, grid_);
      if (std::ranges::any_of(steps, &Step::is_to_none) ||
          !fits(wanted, row_.sizes_of(row_.results[back->result]), grid_))
        continue;
      made_.returned[back->result] = std::move(wanted);
    }
  }

  /// An exchange of one axis may need another one to be out of its way, which it may not be by a gather.
  void check_steps() {
    if (undivided_.empty()) return;
    for (size_t i = 0; i < given_.size() && !made_.refusal; ++i)
      for (const Step& step : steps_between(given_[i], made_.arguments[i], grid_))
        if (step.is_to_none && undivided_[step.axis] == Undivided::kMove) refuse(step.axis);
  }

  void refuse(int axis) {
    if (made_.refusal) return;
    Decision::Refusal found{axis, 0, FactorKind::kEach};
    int64_t most = -1;
    for (size_t i = 0; i < given_.size(); ++i)
      for (const Cut& cut : given_[i].at(0)) {
        const int64_t count = elements(row_.arguments[i], LocalRow(row_));
        if (cut.axis != axis || count <= most) continue;
        most = count;
        found.argument = i;
        found.kind = FactorKind::kEach;
        for (const uint8_t factor : row_.arguments[i][cut.dim])
          if (row_.factors[factor].kind != FactorKind::kEach) found.kind = row_.factors[factor].kind;
      }
    made_.refusal = found;
  }

  /// Whether all that is cut along the axis, and all results, are small beside what a rank has anyway.
  bool is_small(int axis) const {
    for (const LocalRow& local : made_.local) {
      int64_t largest = 0, of_results = 0;
      for (size_t i = 0; i < given_.size(); ++i)
        if (!given_[i].is_cut_along(axis)) largest = std::max(largest, elements(row_.arguments[i], local));
      for (size_t i = 0; i < given_.size(); ++i)
        if (given_[i].is_cut_along(axis) && elements(row_.arguments[i], local) > largest) return false;
      for (const TensorFactors& one : row_.results) of_results += elements(one, local);
      if (of_results > largest) return false;
    }
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

  std::vector<double> shares(int axis, uint8_t factor, const std::vector<Chosen>& chosen) const {
    std::vector<double> shares;
    for (int position = 0; position < grid_.positions(); ++position) {
      const FactorCut& cut = chosen[position].at(factor);
      shares.push_back(static_cast<double>(cut.times * cut.ranges->local(grid_.rank(position, axis))) /
                       static_cast<double>(made_.local[position].sizes[factor]));
    }
    return shares;
  }

  /// Notes the cuts of arguments and results at a position, and what it has of the factors from now on.
  void take(int axis, int position, const Chosen& chosen, const Chosen& of_linked) {
    LocalRow& local = made_.local[position];
    const auto note = [&](Placement& placement, const TensorFactors& dims, const Chosen& cuts) {
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
  const std::vector<Undivided>& undivided_;
  std::map<uint8_t, ByPosition> voted_;  ///< of the axis at hand
  std::vector<WayBack> back_;
  Decision made_;
};

}  // namespace

Decision decide(const Row& row, const std::vector<Placement>& arguments, const AxisGrid& grid,
                const std::vector<int>& leads, const std::vector<Undivided>& undivided) {
  return Decider(row, arguments, grid, leads, undivided).run();
}

}  // namespace trireme
