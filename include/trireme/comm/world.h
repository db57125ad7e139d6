// The ranks of a job and how they find each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "trireme/comm/group.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace trireme {

/// Options of init().
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

/// Options of await_ranks().
struct AwaitOptions {
  /// As InitOptions::timeout.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Variables of torchrun (RANK, MASTER_ADDR, …) that stand for those of the environment.
  std::map<std::string, std::string> variables = {};
};

/// The store at which ranks have met. Rank 0 may serve it: keep this object until all have joined.
struct AwaitedRanks {
  int rank = 0;
  int size = 1;
  // Where a c10d::TCPStore finds it; no host: there is none. A second store of this process that `serves` there is the
  // same one, if it is made as multi-tenant while this object lives.
  std::string host = {};
  uint16_t port = 0;
  bool serves = false;
  std::string path = {};  ///< what keys of this meeting begin with; nobody who does not see the store can guess it
  std::shared_ptr<const void> meeting_point = {};
};

/// Returns when all ranks that the launcher's variables name have come. For programs whose ranks are joined by
/// something other than init(), such as torch.distributed, which waits silently. After 10 s a rank logs for whom it
/// waits.
///
/// Throws    as init(), but ranks may be on several hosts.
AwaitedRanks await_ranks(const AwaitOptions& options = {});

/// How the group that join() makes moves its data.
enum class Transport {
  kAuto,  ///< shared memory where all ranks can have it, else the process group
  kShm,   ///< shared memory, or an error that says why not
  kC10d,  ///< the process group
};

/// Options of join().
struct JoinOptions {
  int rank = 0;
  int size = 1;
  /// TRIREME_COMM=auto|shm|c10d overrides it; the same on every rank.
  Transport transport = Transport::kAuto;
  /// As InitOptions::timeout.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// Joins ranks that have met already: those of a program that torch.distributed has started. They exchange where they
/// run through `store`, and meet in shared memory if that is one host and one PID namespace, else over `process_group`,
/// which may be null where it will not be needed. Local rank and size follow from the hosts. Rank 0 logs what was
/// chosen, and why.
///
/// Requires  all ranks call it, in the same order. The keys in `store` begin with "trireme/".
/// Throws    ConfigError: ranks or transports that do not fit, kShm on several hosts, no process group where one is
///           needed. CommError: a rank that did not come, named. IoError: a store or shared memory that cannot be used.
World join(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
           const JoinOptions& options);

}  // namespace trireme
