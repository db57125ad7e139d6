#include "trireme/schedule/ordered_partition.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/schedule/partition.h"

namespace trireme::pipeline {
namespace {

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr int64_t kTolerance = 50;  // 1/50 of the best heaviest stage: what a cut between layers may cost

using Values = std::vector<int64_t>;

Values each(const std::vector<Atom>& atoms, int64_t Atom::*member) {
  Values values;
  for (const Atom& atom : atoms) {
    if (atom.*member < 0)
      throw ConfigError(str("partition: '", atom.name, "' has ", atom.*member, " of cost or bytes; use 0 or more"));
    values.push_back(atom.*member);
  }
  return values;
}

int64_t sum_of(const Values& values, const Values& bounds, int stage) {
  int64_t sum = 0;
  for (int64_t i = bounds[stage]; i < bounds[stage + 1]; ++i) sum += values[i];
  return sum;
}

int heaviest_stage(const Values& values, const Values& bounds) {
  int heaviest = 0;
  for (int stage = 1; stage + 1 < static_cast<int>(bounds.size()); ++stage)
    if (sum_of(values, bounds, stage) > sum_of(values, bounds, heaviest)) heaviest = stage;
  return heaviest;
}

/// Throws where even the cut whose fullest stage takes the least does not fit.
void check_fits(const std::vector<Atom>& atoms, int stages, const Values& bytes, int64_t limit_bytes) {
  for (const Atom& atom : atoms)
    if (atom.bytes > limit_bytes)
      throw ConfigError(str("partition: '", atom.name, "' takes ", atom.bytes, " bytes, and a rank has ", limit_bytes,
                            "; an atom is not cut over stages: use ranks with more memory, or fewer open micro-batches "
                            "(active_microbatches)"));
  const Values bounds = partition_within(bytes, stages, Values(bytes.size()), 0);
  const int fullest = heaviest_stage(bytes, bounds);
  const int64_t least = sum_of(bytes, bounds, fullest);
  if (least > limit_bytes)
    throw ConfigError(str("partition: no cut over ", stages, " stages stays within the ", limit_bytes,
                          " bytes of a rank; the least limit for which there is one is ", least, ", taken by '",
                          atoms[bounds[fullest]].name, "' to '", atoms[bounds[fullest + 1] - 1].name,
                          "': use more stages, ranks with more memory, or fewer open micro-batches "
                          "(active_microbatches)"));
}

/// The first atoms, cut into some stages.
struct CrossingCut {
  int64_t crossing_bytes = kAny;  // kAny: there is none
  int64_t heaviest = kAny;
  int64_t last_begin = 0;
  bool is_better_than(const CrossingCut& other) const {
    return std::tie(crossing_bytes, heaviest) < std::tie(other.crossing_bytes, other.heaviest);
  }
};

}  // namespace

std::vector<int64_t> ordered_partition(const std::vector<Atom>& atoms, int stages, int64_t limit_bytes) {
  const Values costs = each(atoms, &Atom::cost), bytes = each(atoms, &Atom::bytes);
  (void)each(atoms, &Atom::crossing_bytes);
  const auto count = static_cast<int64_t>(atoms.size());
  if (count <= 1 || stages <= 1) {
    const Values bounds = partition_uniform(count, stages);  // which checks `stages`
    check_fits(atoms, stages, bytes, limit_bytes);
    return bounds;
  }
  check_fits(atoms, stages, bytes, limit_bytes);
  const Values best = partition_within(costs, stages, bytes, limit_bytes);
  const int64_t lightest = sum_of(costs, best, heaviest_stage(costs, best));
  const int64_t most = lightest + lightest / kTolerance;

  const int used = static_cast<int>(std::min<int64_t>(stages, count));
  std::vector<std::vector<CrossingCut>> cuts(count + 1, std::vector<CrossingCut>(used + 1));
  cuts[0][0] = {.crossing_bytes = 0, .heaviest = 0};
  for (int64_t end = 1; end <= count; ++end) {
    int64_t cost = 0, taken = 0;  // of [begin, end)
    for (int64_t begin = end - 1; begin >= 0; --begin) {
      cost += costs[begin];
      taken += bytes[begin];
      if (cost > most || taken > limit_bytes) break;
      for (int stage = 1; stage <= used; ++stage) {
        const CrossingCut& before = cuts[begin][stage - 1];
        if (before.crossing_bytes == kAny) continue;
        const int64_t crossing = begin == 0 ? 0 : atoms[begin - 1].crossing_bytes;
        const CrossingCut cut{before.crossing_bytes + crossing, std::max(before.heaviest, cost), begin};
        if (cut.is_better_than(cuts[end][stage])) cuts[end][stage] = cut;
      }
    }
  }
  Values bounds(stages + 1, count);
  for (int stage = used; stage > 0; --stage) bounds[stage - 1] = cuts[bounds[stage]][stage].last_begin;
  return bounds;
}

}  // namespace trireme::pipeline
