#include "trireme/schedule/tree_partition.h"

#include <queue>

#include "trireme/base/error.h"
#include "trireme/schedule/partition.h"

namespace trireme::pipeline {
namespace {

using Devices = std::vector<int>;

/// Modules that are placed, breadth first.
class Tree {
 public:
  Tree(const std::vector<TreeModule>& modules, int stages)
      : costs_(modules.size()), children_(modules.size()), devices_(modules.size()) {
    for (int i = static_cast<int>(modules.size()) - 1; i >= 0; --i) {
      const auto& [parent, own_cost] = modules[i];
      if (own_cost < 0) throw ConfigError(str("partition: module ", i, " has a cost of ", own_cost, "; use 0 or more"));
      if (parent >= i || (parent < 0) != (i == 0))
        throw ConfigError(str("partition: module ", i, " has the parent ", parent,
                              "; a parent stands before its children, and the first module alone has none (-1)"));
      costs_[i] += own_cost;
      if (i > 0) costs_[parent] += costs_[i];
    }
    for (int i = 1; i < static_cast<int>(modules.size()); ++i) children_[modules[i].parent].push_back(i);
    for (int stage = 0; stage < stages; ++stage) devices_[0].push_back(stage);
  }

  std::vector<int> homes() {
    std::vector<int> homes(costs_.size());
    std::queue<int> next({0});
    for (; !next.empty(); next.pop()) {
      const int module = next.front();
      homes[module] = devices_[module].front();
      place(devices_[module], children_[module]);
      for (const int child : children_[module]) next.push(child);
    }
    return homes;
  }

 private:
  void place(const Devices& devices, const std::vector<int>& modules) {
    if (devices.size() == 1 || modules.size() == 1) {
      for (const int module : modules) devices_[module] = devices;
      return;
    }
    if (modules.empty()) return;
    const auto segments = segments_of(modules, static_cast<int>(std::min(devices.size(), modules.size())));
    const std::vector<Devices> given = give(devices, segments);
    for (size_t i = 0; i < segments.size(); ++i)
      place(given[i].empty() ? Devices{devices.front()} : given[i], segments[i]);
  }

  std::vector<std::vector<int>> segments_of(const std::vector<int>& modules, int count) const {
    std::vector<int64_t> costs;
    for (const int module : modules) costs.push_back(costs_[module]);
    const std::vector<int64_t> bounds = partition_within(costs, count, std::vector<int64_t>(costs.size()), 0);
    std::vector<std::vector<int>> segments;
    for (int i = 0; i < count; ++i) segments.emplace_back(modules.begin() + bounds[i], modules.begin() + bounds[i + 1]);
    return segments;
  }

  /// The devices of each segment, by D'Hondt; of equal quotients the first segment gets the device.
  std::vector<Devices> give(const Devices& devices, const std::vector<std::vector<int>>& segments) const {
    std::vector<Devices> given(segments.size());
    std::vector<int64_t> costs(segments.size());
    for (size_t i = 0; i < segments.size(); ++i)
      for (const int module : segments[i]) costs[i] += costs_[module];
    for (const int device : devices) {
      size_t highest = 0;
      for (size_t i = 1; i < segments.size(); ++i)
        if (costs[i] * static_cast<int64_t>(given[highest].size() + 1) >
            costs[highest] * static_cast<int64_t>(given[i].size() + 1))
          highest = i;
      given[highest].push_back(device);
    }
    return given;
  }

  std::vector<int64_t> costs_;  // with those of the children
  std::vector<std::vector<int>> children_;
  std::vector<Devices> devices_;
};

}  // namespace

std::vector<int> tree_partition(const std::vector<TreeModule>& modules, int stages) {
  if (stages < 1) throw ConfigError(str("partition: ", stages, " stages; use 1 or more"));
  if (modules.empty()) return {};
  return Tree(modules, stages).homes();
}

}  // namespace trireme::pipeline
