#include "trireme/schedule/partition.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/base/name_pattern.h"

namespace trireme::pipeline {

namespace {

void check_stages(int stages) {
  if (stages < 1) throw ConfigError(str("pipeline: ", stages, " stages; use 1 or more"));
}

/// sums[i]: of the first i.
std::vector<int64_t> running_sums(const std::vector<int64_t>& values) {
  std::vector<int64_t> sums(values.size() + 1);
  std::partial_sum(values.begin(), values.end(), sums.begin() + 1);
  return sums;
}

}  // namespace

std::vector<int64_t> partition_uniform(int64_t layers, int stages) {
  check_stages(stages);
  std::vector<int64_t> bounds = {0};
  for (int stage = 0; stage < stages; ++stage)
    bounds.push_back(bounds.back() + layers / stages + (stage < layers % stages ? 1 : 0));
  return bounds;
}

std::vector<int64_t> partition_balanced(const std::vector<int64_t>& weights, int stages) {
  check_stages(stages);
  const auto layers = static_cast<int64_t>(weights.size());
  for (const int64_t weight : weights)
    if (weight < 0) throw ConfigError(str("pipeline: a layer of weight ", weight, "; use 0 or more"));
  if (layers <= stages) return partition_uniform(layers, stages);
  const std::vector<int64_t> sum_before = running_sums(weights);

  // The best partition of the first `end` layers over the first `used` stages.
  struct Best {
    int64_t heaviest = 0;
    int64_t lightest = std::numeric_limits<int64_t>::max();
    int64_t difference = std::numeric_limits<int64_t>::max();
    int64_t last_begin = 0;
    bool is_possible = false;
  };
  std::vector<std::vector<Best>> best(layers + 1, std::vector<Best>(stages + 1));
  best[0][0].is_possible = true;
  for (int64_t end = 1; end <= layers; ++end)
    for (int used = 1; used <= std::min<int64_t>(end, stages); ++used)
      for (int64_t begin = 0; begin < end; ++begin) {
        const Best& before = best[begin][used - 1];
        if (!before.is_possible) continue;
        const int64_t weight = sum_before[end] - sum_before[begin];
        const int64_t heaviest = std::max(before.heaviest, weight), lightest = std::min(before.lightest, weight);
        Best& here = best[end][used];
        // Among equal ones the later begin wins, as DeepSpeed has it.
        if (here.is_possible && heaviest - lightest > here.difference) continue;
        here = {heaviest, lightest, heaviest - lightest, begin, true};
      }
  std::vector<int64_t> bounds(stages + 1);
  bounds[stages] = layers;
  for (int stage = stages; stage > 0; --stage) bounds[stage - 1] = best[bounds[stage]][stage].last_begin;
  return bounds;
}

namespace {

/// The first layers, cut into some stages: the heaviest stage, and where the last one begins.
struct Cut {
  int64_t heaviest = std::numeric_limits<int64_t>::max();
  int64_t last_begin = 0;
};

/// cuts[end][used]: of the first `end` layers over `used` stages, each of at most `limit_bytes`, the one with the
/// lightest heaviest stage.
std::vector<std::vector<Cut>> best_cuts(const std::vector<int64_t>& weights, int stages,
                                        const std::vector<int64_t>& bytes, int64_t limit_bytes) {
  const std::vector<int64_t> weight_before = running_sums(weights), bytes_before = running_sums(bytes);
  const auto layers = static_cast<int64_t>(weights.size());
  std::vector<std::vector<Cut>> cuts(layers + 1, std::vector<Cut>(stages + 1));
  cuts[0][0].heaviest = 0;
  for (int64_t end = 1; end <= layers; ++end)
    for (int used = 1; used <= std::min<int64_t>(end, stages); ++used)
      for (int64_t begin = used - 1; begin < end; ++begin) {
        if (bytes_before[end] - bytes_before[begin] > limit_bytes) continue;
        const int64_t heaviest = std::max(cuts[begin][used - 1].heaviest, weight_before[end] - weight_before[begin]);
        if (heaviest < cuts[end][used].heaviest) cuts[end][used] = {heaviest, begin};
      }
  return cuts;
}

}  // namespace

std::vector<int64_t> partition_within(const std::vector<int64_t>& weights, int stages,
                                      const std::vector<int64_t>& bytes, int64_t limit_bytes) {
  check_stages(stages);
  if (weights.size() != bytes.size())
    throw ConfigError(
        str("pipeline: ", weights.size(), " weights and ", bytes.size(), " sizes of layers; give one each"));
  const auto layers = static_cast<int64_t>(weights.size());
  const int used = static_cast<int>(std::min<int64_t>(stages, layers));  // further stages have no layer
  const auto cuts = best_cuts(weights, used, bytes, limit_bytes);
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  if (cuts[layers][used].heaviest == kNone)
    throw ConfigError(str("pipeline: no partition over ", stages, " stages stays within ", limit_bytes,
                          " bytes; the least for which there is one is ",
                          best_cuts(bytes, used, bytes, kNone)[layers][used].heaviest));
  std::vector<int64_t> bounds(stages + 1, layers);
  for (int stage = used; stage > 0; --stage) bounds[stage - 1] = cuts[bounds[stage]][stage].last_begin;
  return bounds;
}

std::vector<int64_t> partition_by_type(const std::vector<std::string>& classes, const std::string& regex, int stages) {
  std::vector<int64_t> weights;
  const NamePattern pattern(regex, "partition_method: \"type:…\"", NamePattern::Case::kIgnored);
  for (const std::string& name : classes) weights.push_back(pattern.is_in(name) ? 1 : 0);
  if (std::find(weights.begin(), weights.end(), 1) == weights.end())
    throw ConfigError(str("partition_method: no layer's class matches \"type:", regex, "\"; the classes are ", [&] {
      std::string list;
      for (const std::string& name : classes)
        if (list.find(name) == std::string::npos) list += (list.empty() ? "" : ", ") + name;
      return list;
    }()));
  return partition_balanced(weights, stages);
}

}  // namespace trireme::pipeline
