#include "tensor/cuts.h"

#include "trireme/base/error.h"

namespace trireme::tensor {
namespace {

int64_t stretch_of(int64_t extent, int64_t count, const char* what) {
  if (extent % count != 0)
    throw ConfigError(str("a dim of ", extent, " does not divide by ", count, " ", what,
                          "; give the model's own head counts, or a shape of its sub-parameters"));
  return extent / count;
}

RankIntervals scaled(const std::vector<Interval>& units, int64_t stretch) {
  RankIntervals cut;
  for (const Interval& unit : units) cut.push_back({{unit.begin * stretch, unit.end * stretch}});
  return cut;
}

/// A key/value head's stretch: its query heads, its key, its value.
RankIntervals cut_grouped(int64_t size, const Heads& heads, const HeadCut& of_ranks) {
  const int64_t group = heads.queries / heads.key_values;
  RankIntervals cut;
  for (size_t rank = 0; rank < of_ranks.queries.size(); ++rank) {
    const Interval queries = of_ranks.queries[rank], key_values = of_ranks.key_values[rank];
    std::vector<Interval>& intervals = cut.emplace_back();
    const int64_t begin = key_values.begin * (group + 2), end = key_values.end * (group + 2);
    if (queries.size() == key_values.size() * group) {
      intervals.push_back({begin * size, end * size});
      continue;
    }
    const int64_t first = begin + queries.begin - key_values.begin * group;
    const Interval own{first * size, (first + queries.size()) * size}, shared{(end - 2) * size, end * size};
    if (own.end == shared.begin)
      intervals.push_back({own.begin, shared.end});
    else
      intervals.insert(intervals.end(), {own, shared});
  }
  return cut;
}

}  // namespace

std::vector<Interval> even(int64_t count, int ranks) {
  std::vector<Interval> intervals;
  int64_t begin = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t end = begin + count / ranks + (rank < count % ranks ? 1 : 0);
    intervals.push_back({begin, end});
    begin = end;
  }
  return intervals;
}

HeadCut cut_heads(const Heads& heads, int ranks) {
  const int64_t group = heads.queries / heads.key_values;
  HeadCut cut;
  if (ranks <= heads.key_values) {
    cut.key_values = even(heads.key_values, ranks);
    for (const Interval& own : cut.key_values) cut.queries.push_back({own.begin * group, own.end * group});
    return cut;
  }
  const std::vector<Interval> ranks_of = even(ranks, static_cast<int>(heads.key_values));
  for (int64_t head = 0; head < heads.key_values; ++head) {
    for (const Interval& own : even(group, static_cast<int>(ranks_of[head].size()))) {
      cut.key_values.push_back({head, head + 1});
      cut.queries.push_back({head * group + own.begin, head * group + own.end});
    }
  }
  return cut;
}

RankIntervals cut_features(int64_t extent, int ranks, int64_t grain) {
  if (extent / grain < ranks)
    throw ConfigError(str(ranks, " ranks share a dim of ", extent,
                          grain > 1 ? str(" in steps of tp_grain_size=", grain) : "",
                          ": some would have none; use fewer ranks", grain > 1 ? ", or a smaller tp_grain_size" : ""));
  RankIntervals cut = scaled(even(extent / grain, ranks), grain);
  cut.back().back().end = extent;
  return cut;
}

RankIntervals cut_equally(int64_t extent, int ranks) {
  if (extent % ranks != 0)
    throw ConfigError(str("the number of heads is unknown, so ", ranks, " ranks have equal shares, and a dim of ",
                          extent,
                          " does not divide by them; give num_attention_heads, or use another number of ranks"));
  return scaled(even(ranks, ranks), extent / ranks);
}

RankIntervals cut_by_heads(int64_t extent, Units units, const Heads& heads, int ranks) {
  if (heads.queries <= 0)
    throw ConfigError("attention is cut by heads, and their number is unknown; give num_attention_heads");
  if (heads.key_values <= 0 || heads.queries % heads.key_values != 0)
    throw ConfigError(str(heads.queries, " attention heads do not divide by ", heads.key_values, " key/value heads"));
  if (ranks > heads.queries)
    throw ConfigError(str(ranks, " ranks share ", heads.queries,
                          " attention heads, and heads are not split; use at most ", heads.queries, " ranks"));
  const HeadCut cut = cut_heads(heads, ranks);
  if (units == Units::kHeads) return scaled(cut.queries, stretch_of(extent, heads.queries, "attention heads"));
  if (units == Units::kKeyValueHeads)
    return scaled(cut.key_values, stretch_of(extent, heads.key_values, "key/value heads"));
  const int64_t size =
      stretch_of(extent, heads.queries + 2 * heads.key_values, "heads of queries, keys and values together");
  if (units == Units::kGroupedQkv) return cut_grouped(size, heads, cut);
  const RankIntervals of_kv = scaled(cut.key_values, size);
  return stack({heads.queries * size, heads.key_values * size, heads.key_values * size},
               {scaled(cut.queries, size), of_kv, of_kv});
}

RankIntervals stack(const std::vector<int64_t>& extents, const std::vector<RankIntervals>& cuts) {
  RankIntervals stacked(cuts.front().size());
  int64_t begin = 0;
  for (size_t i = 0; i < extents.size(); begin += extents[i++]) {
    for (size_t rank = 0; rank < stacked.size(); ++rank) {
      for (const Interval& own : cuts[i][rank]) {
        std::vector<Interval>& intervals = stacked[rank];
        if (!intervals.empty() && intervals.back().end == begin + own.begin)
          intervals.back().end = begin + own.end;
        else
          intervals.push_back({begin + own.begin, begin + own.end});
      }
    }
  }
  return stacked;
}

}  // namespace trireme::tensor
