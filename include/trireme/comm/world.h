// The ranks of a job and how they find each other.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "trireme/comm/group.h"

namespace trireme {

struct InitOptions {
  /// How long a rank waits for a peer that is alive but does not arrive. TRIREME_TIMEOUT_S overrides it.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// This process's place in the job. Owns the world group.
struct World {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::unique_ptr<Group> group;
};

/// Reads the ranks from torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), OpenMPI's
/// (OMPI_COMM_WORLD_*) or SLURM's (SLURM_PROCID, SLURM_NTASKS, …) variables, and joins them; without any, a world of
/// one.
///
/// Throws    ConfigError: a variable that is missing or is no number, ranks on more than one host (named).
///           CommError: a peer did not arrive in time.
World init(const InitOptions& options = {});

}  // namespace trireme
