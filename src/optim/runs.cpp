#include "optim/runs.h"

#include <algorithm>

namespace trireme {

std::vector<Run> plan_runs(const UnitLayout& unit, int64_t begin, int64_t numel, const std::vector<bool>& touched,
                           const std::vector<int64_t>& steps, const std::vector<int>& group_of) {
  std::vector<Run> runs;
  for (size_t i = 0; i < unit.parameters.size(); ++i) {
    const ParameterPlace& placement = unit.parameters[i];
    const bool last = i + 1 == unit.parameters.size();
    const int64_t low = std::max(placement.begin, begin) - begin;
    const int64_t high = std::min(last ? unit.numel() : unit.parameters[i + 1].begin, begin + numel) - begin;
    if (low >= high || !touched[placement.index]) continue;
    const int64_t step = steps[placement.index] + 1;
    const int group = group_of[placement.index];
    const Run* before = runs.empty() ? nullptr : &runs.back();
    if (before && before->end == low && before->step == step && before->group == group)
      runs.back().end = high;
    else
      runs.push_back({low, high, step, group, placement.index});
  }
  return runs;
}

}  // namespace trireme
