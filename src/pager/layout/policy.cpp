#include "trireme/pager/layout/policy.h"

namespace trireme {

std::vector<bool> offloaded_units(const Layout& layout, double ratio) {
  std::vector<bool> result(layout.units.size());
  int64_t total = 0, offloaded = 0;
  for (const UnitLayout& unit : layout.units) total += unit.trainable ? unit.numel() : 0;
  for (size_t i = result.size(); i-- > 0;) {
    const UnitLayout& unit = layout.units[i];
    if (!unit.trainable || static_cast<double>(offloaded) >= ratio * static_cast<double>(total)) continue;
    result[i] = true;
    offloaded += unit.numel();
  }
  return result;
}

}  // namespace trireme
