// The check of a loss scale.
#pragma once

#include <cmath>

namespace trireme {

inline bool is_positive(double number) { return number > 0 && std::isfinite(number); }

}  // namespace trireme
