// The ranks of the job, as Python holds them.
#pragma once

#include "python/bindings.h"
#include "trireme/comm/world.h"

namespace trireme::python {

struct WorldHandle {
  World world;
};

}  // namespace trireme::python
