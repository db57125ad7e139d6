// The exchanges that lead from one placement of a tensor to another one, an axis at a time: pure arithmetic.
#pragma once

#include <cstdint>
#include <vector>

#include "trireme/activations/placement.h"

namespace trireme {

/// The ways of an axis where no factor that tensors are cut along can be divided.
enum class Undivided : uint8_t {
  kGather,  ///< every rank gets them whole
  kMove,    ///< they are cut otherwise; what is small becomes whole; all else is refused
};

/// One axis's cut becomes the wanted one, or none for a while.
struct Step {
  int axis = 0;
  bool is_to_none = false;  ///< although it is wanted: another axis's cut of the dim has to change first
};

/// A cut changes while no later axis cuts what it leaves of its dims, and when earlier ones cut these as is wanted; an
/// axis in the way of an earlier one is gathered, the last such axis first, and once at most.
std::vector<Step> steps_between(const Placement& given, const Placement& wanted, const AxisGrid& grid);

}  // namespace trireme
