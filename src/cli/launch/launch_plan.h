// The plan of `trireme launch`: flags and facts of the machine in, one command per rank out. Pure.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/launch/hostfile.h"

namespace trireme::cli {

enum class ProgramKind {
  kDetect,   ///< a .py file runs under Python, everything else as it is
  kProgram,  ///< --no_python: always as it is
  kModule,   ///< --module: Python runs the module NAME
};

/// The flags, as they were given.
struct LaunchRequest {
  std::optional<int> ranks_per_node = {};  ///< --num_gpus
  std::optional<int> nodes = {};           ///< --num_nodes
  std::vector<HostSlots> hosts = {};       ///< of --hostfile; empty without one
  std::string hosts_file = {};             ///< its path, which opens errors about them
  std::string include = {};
  std::string exclude = {};
  std::string master_addr = {};
  std::optional<int> master_port = {};
  ProgramKind kind = ProgramKind::kDetect;
  std::string names_of = {};              ///< the program is Python, and runs by trireme.as_NAME; empty: as it is
  bool passes_local_rank = false;         ///< --local_rank=N becomes the program's first argument
  std::vector<std::string> program = {};  ///< the program and its arguments
};

/// The facts of this machine that the plan needs.
struct LaunchMachine {
  std::string host_name = "localhost";
  int cores = 1;                     ///< that this process may use
  int free_port = 0;                 ///< for rendezvous, where no --master_port is given
  bool has_omp_num_threads = false;  ///< OMP_NUM_THREADS is set in the environment
  std::string python = "python3";    ///< or what TRIREME_PYTHON or the build says
  std::string python_path = {};      ///< for PYTHONPATH; empty: the environment's stays
  std::string token = {};            ///< for TRIREME_TOKEN; empty where the environment has one
};

struct RankCommand {
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>> environment;  ///< added to the launcher's own
};

/// Advice for jobs on more than one host.
inline constexpr const char* kSeveralHosts =
    "`trireme launch` starts ranks on this machine alone; on several hosts run on each of them: torchrun --nnodes N "
    "--node_rank K --nproc_per_node G --master_addr HOST --master_port PORT train.py (before train.py: -m "
    "trireme.as_deepspeed where it says `import deepspeed`), with rank 0's HOST and one PORT";

/// One command per rank, in rank order, with torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
/// GROUP_RANK, MASTER_ADDR, MASTER_PORT), DeepSpeed's LOCAL_SIZE, and OMP_NUM_THREADS = cores / ranks (at least 1)
/// unless that is set; the secret by which they know each other is TRIREME_TOKEN. Slots that were chosen by --include
/// or --exclude also become CUDA_VISIBLE_DEVICES, as with the `deepspeed` launcher.
///
/// Throws    ConfigError: no program, flags that exclude each other, more ranks than slots;
///           kUnsupported: a host other than this one, by its name.
std::vector<RankCommand> plan_launch(const LaunchRequest& request, const LaunchMachine& machine);

}  // namespace trireme::cli
