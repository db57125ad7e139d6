// The ranks of the job, as Python holds them.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <utility>

#include "python/bindings.h"
#include "trireme/comm/world.h"

namespace trireme::python {

struct WorldHandle {
  explicit WorldHandle(World joined) : world(std::move(joined)) {}

  World world;
  const pid_t process = ::getpid();  ///< that joined

  /// Python ends a forked process by destroying its copies of objects. That must not end the rank that they are of.
  bool is_forked() const { return process != ::getpid(); }
};

}  // namespace trireme::python
