// Where the ranks' slices of one dim begin and end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trireme/base/tensor_part.h"

namespace trireme::tensor {

/// The whole things that a dim consists of.
enum class Units {
  kFeatures,       ///< single indices, tp_grain_size of them
  kHeads,          ///< a stretch for each query head
  kKeyValueHeads,  ///< a stretch for each key/value head
  kStackedQkv,     ///< all query heads, then all key heads, then all value heads
  kGroupedQkv,     ///< for each key/value head: its query heads, its key, its value
};

struct Heads {
  int64_t queries = 0;
  int64_t key_values = 0;
};

/// Intervals by rank.
using RankIntervals = std::vector<std::vector<Interval>>;

/// Ranks share `count` things as evenly as these allow: the first count % ranks have one more.
std::vector<Interval> even(int64_t count, int ranks);

/// The heads of each rank. Up to as many ranks as key/value heads: these are shared evenly, and query heads go with
/// theirs. More ranks: each key/value head has its own ranks, as evenly as that goes, which share its query heads.
struct HeadCut {
  std::vector<Interval> queries;
  std::vector<Interval> key_values;
};
HeadCut cut_heads(const Heads& heads, int ranks);

/// `extent` features in steps of `grain`; what is left over goes to the last rank.
/// Throws    ConfigError: a rank would have none.
RankIntervals cut_features(int64_t extent, int ranks, int64_t grain);

/// The same for each rank: of heads whose number is unknown. The operators of an attention show whether heads are
/// whole.
/// Throws    ConfigError: `extent` does not divide by `ranks`.
RankIntervals cut_equally(int64_t extent, int ranks);

/// Throws    ConfigError: heads are unknown, or do not fit `extent`, or are fewer than ranks.
RankIntervals cut_by_heads(int64_t extent, Units units, const Heads& heads, int ranks);

/// One matrix behind the other, each of which is cut: `cuts` with their extents.
RankIntervals stack(const std::vector<int64_t>& extents, const std::vector<RankIntervals>& cuts);

}  // namespace trireme::tensor
