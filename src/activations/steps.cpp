#include "trireme/activations/steps.h"

#include <algorithm>
#include <optional>

namespace trireme {
namespace {

/// The cuts of a position, by axis.
using ByAxis = std::vector<std::optional<Cut>>;

std::vector<ByAxis> by_axis(const Placement& placement, const AxisGrid& grid) {
  std::vector<ByAxis> all(grid.positions(), ByAxis(grid.axes()));
  for (int position = 0; position < grid.positions(); ++position)
    for (const Cut& cut : placement.at(position)) all[position][cut.axis] = cut;
  return all;
}

bool is_on(const std::optional<Cut>& cut, int64_t dim) { return cut && cut->dim == dim; }

/// Whether the cut of an axis can become `to` now.
bool is_free(const ByAxis& now, const ByAxis& wanted, int axis, const std::optional<Cut>& to) {
  for (const std::optional<Cut>& cut : {now[axis], to}) {
    if (!cut) continue;
    for (size_t later = axis + 1; later < now.size(); ++later)
      if (is_on(now[later], cut->dim)) return false;
  }
  for (int earlier = 0; to && earlier < axis; ++earlier)
    if ((is_on(now[earlier], to->dim) || is_on(wanted[earlier], to->dim)) && now[earlier] != wanted[earlier])
      return false;
  return true;
}

/// Whether an axis cuts a dim that an earlier one leaves or comes to.
bool is_in_the_way(const ByAxis& now, const ByAxis& wanted, int axis) {
  for (int earlier = 0; now[axis] && earlier < axis; ++earlier)
    if (now[earlier] != wanted[earlier] &&
        (is_on(now[earlier], now[axis]->dim) || is_on(wanted[earlier], now[axis]->dim)))
      return true;
  return false;
}

}  // namespace

std::vector<Step> steps_between(const Placement& given, const Placement& wanted, const AxisGrid& grid) {
  std::vector<ByAxis> now = by_axis(given, grid);
  const std::vector<ByAxis> to = by_axis(wanted, grid);
  std::vector<Step> steps;
  const auto everywhere = [&](auto condition) {
    for (size_t position = 0; position < now.size(); ++position)
      if (!condition(now[position], to[position])) return false;
    return true;
  };
  const auto is_done = [&](int axis) {
    return everywhere([axis](const ByAxis& own, const ByAxis& end) { return own[axis] == end[axis]; });
  };
  const auto can_change = [&](int axis) {
    return everywhere([axis](const ByAxis& own, const ByAxis& end) { return is_free(own, end, axis, end[axis]); });
  };
  for (;;) {
    int next = -1, in_the_way = -1;
    bool are_all_done = true;
    for (int axis = grid.axes() - 1; axis >= 0; --axis) {
      if (in_the_way < 0 &&
          !everywhere([axis](const ByAxis& own, const ByAxis& end) { return !is_in_the_way(own, end, axis); }))
        in_the_way = axis;
      if (is_done(axis)) continue;
      are_all_done = false;
      if (next < 0 && can_change(axis)) next = axis;
    }
    if (are_all_done) return steps;
    const bool is_to_none = next < 0;
    const int axis = is_to_none ? in_the_way : next;
    for (size_t position = 0; position < now.size(); ++position)
      now[position][axis] = is_to_none ? std::nullopt : to[position][axis];
    steps.push_back({axis, is_to_none});
  }
}

}  // namespace trireme
