#include "trireme/base/environment.h"

#include <algorithm>
#include <cstdlib>

#include "trireme/base/error.h"

namespace trireme {

namespace {

constexpr auto kUsers = VariableKind::kUsers, kLaunchers = VariableKind::kLaunchers, kOwn = VariableKind::kOwn;

constexpr EnvironmentVariable kVariables[] = {
    {"TRIREME_COMM", kUsers, "`auto`",
     "what ranks that have met under torch.distributed speak over: `auto`, `shm` (an error where they cannot share "
     "memory) or `c10d`; overrides `JoinOptions::transport` ([comm](comm.md))"},
    {"TRIREME_DEVICE", kUsers, "`auto`",
     "where `initialize()` of Python puts a model: `auto` (a GPU, if there is one), `cpu`, `cuda`, `cuda:1` "
     "([device](device.md))"},
    {"TRIREME_LOG_LEVEL", kUsers, "`INFO`",
     "the lowest level that is logged, in Python and in `trireme train`: `DEBUG`, `INFO`, `WARNING`, `ERROR`"},
    {"TRIREME_PROGRAM", kUsers, "`trireme` of `PATH`",
     "the program that a checkpoint's `zero_to_fp32.py` calls ([checkpoint](checkpoint.md))"},
    {"TRIREME_PYTHON", kUsers, "the package's",
     "the Python under which `trireme launch` runs scripts ([cli](cli.md)), and whose pyarrow reads Parquet "
     "([data](data.md))"},
    {"TRIREME_RECORD", kUsers, "no record",
     "a folder for the record of a program's run, the same on every rank; the key `trireme.record` overrides it "
     "([observe](observe.md#a-programs-record))"},
    {"TRIREME_RESOLVE_TIMEOUT_S", kUsers, "60",
     "how long a rank asks for the address of `MASTER_ADDR`, in seconds; names of containers come late"},
    {"TRIREME_TIMEOUT_S", kUsers, "1800",
     "how long a rank waits for a peer that is alive but does not come, in seconds; overrides `InitOptions::timeout`"},
    {"TRIREME_TOKEN", kUsers, "drawn by our launcher", "the job's secret, the same on every rank ([trust](trust.md))"},
    {"TRIREME_TRACEBACK", kUsers, "the program's own frames",
     "`full`: errors are shown with every frame of Python ([python](python.md))"},
    {"TRIREME_WARN_AFTER_S", kUsers, "60",
     "how long a wait is silent about a peer whose process is stopped or, between hosts, that is late, in seconds"},
    {"SM_HP_MP_PARAMETERS", kUsers, "",
     "JSON of the configuration of `smp.init()`, as SageMaker sets it; overrides what the program gives "
     "([smp](smp.md))"},
    {"SMP_NCCL_THROTTLE_LIMIT", kUsers, "",
     "of smp's transport, as the two that follow: set, it changes nothing, and rank 0 says so ([smp](smp.md))"},
    {"SMP_DISABLE_D2D", kUsers, "", "the same"},
    {"SMP_D2D_GPU_BUFFER_SIZE_BYTES", kUsers, "", "the same"},
    {"OMP_NUM_THREADS", kUsers, "the cores of a rank",
     "threads of one rank; our launcher divides the machine's cores where it is not set"},
    {"PATH", kUsers, "`/usr/bin:/bin`", "where programs are found that a launcher starts"},
    {"PYTHONPATH", kUsers, "", "kept for ranks, with the package's folder behind it"},
    {"LD_LIBRARY_PATH", kUsers, "", "kept, with torch's libraries before it where they do not lie beside the package"},
    {"TERM", kUsers, "", "`dumb`, or nothing: no line of progress is drawn"},

    {"RANK", kLaunchers, "a world of one", "torchrun's, ours: this process's number"},
    {"WORLD_SIZE", kLaunchers, "", "the number of processes"},
    {"LOCAL_RANK", kLaunchers, "`RANK`", "this process's number on its host"},
    {"LOCAL_WORLD_SIZE", kLaunchers, "", "the number of processes on this host"},
    {"LOCAL_SIZE", kLaunchers, "",
     "the same, by DeepSpeed's launcher; `trireme deepspeed` starts as many ranks where there is no GPU"},
    {"MASTER_ADDR", kLaunchers, "127.0.0.1", "the host of rank 0"},
    {"MASTER_PORT", kLaunchers, "29500", "the port at which ranks meet there"},
    {"TORCHELASTIC_RESTART_COUNT", kLaunchers, "0",
     "torchrun's number of the attempt: ranks of another one never meet"},
    {"TORCHELASTIC_USE_AGENT_STORE", kLaunchers, "", "`True`: torchrun's agent serves the meeting, and no rank"},
    {"OMPI_COMM_WORLD_RANK", kLaunchers, "", "mpirun's `RANK`"},
    {"OMPI_COMM_WORLD_SIZE", kLaunchers, "", "mpirun's `WORLD_SIZE`"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", kLaunchers, "", "mpirun's `LOCAL_RANK`"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", kLaunchers, "", "mpirun's `LOCAL_WORLD_SIZE`"},
    {"OMPI_MCA_ess_base_jobid", kLaunchers, "", "mpirun's name of the job, before PMIx"},
    {"PMIX_RANK", kLaunchers, "", "the same as `OMPI_COMM_WORLD_RANK`, by which Python's log knows rank 0"},
    {"PMI_RANK", kLaunchers, "", "the same of MPICH"},
    {"PMIX_NAMESPACE", kLaunchers, "", "mpirun's name of the job"},
    {"PMIX_SERVER_TMPDIR", kLaunchers, "", "the folder of mpirun's session, in which ranks meet"},
    {"SLURM_PROCID", kLaunchers, "", "srun's `RANK`"},
    {"SLURM_STEP_NUM_TASKS", kLaunchers, "", "srun's `WORLD_SIZE`"},
    {"SLURM_NTASKS", kLaunchers, "", "the same, where the step does not say it"},
    {"SLURM_LOCALID", kLaunchers, "", "srun's `LOCAL_RANK`"},
    {"SLURM_STEP_NUM_NODES", kLaunchers, "1", "the number of hosts"},
    {"SLURM_NNODES", kLaunchers, "1", "the same, where the step does not say it"},
    {"SLURM_STEP_NODELIST", kLaunchers, "", "the hosts, of which the first has rank 0"},
    {"SLURM_STEP_ID", kLaunchers, "", "only within a step is a process one of srun's ranks"},
    {"SLURM_JOB_ID", kLaunchers, "", "with the step's, the port at which ranks meet"},
    {"SLURM_RESTART_COUNT", kLaunchers, "0", "the number of the attempt"},

    {"TRIREME_COLUMNS", kOwn, "", "how wide the terminal is to which a launcher shows a rank's stderr"},
    {"TRIREME_COMMAND", kOwn, "", "the command that was typed, where Python's `trireme` becomes the program"},
    {"TRIREME_LAUNCHER", kOwn, "", "the socket by which a rank tells its launcher why it ends"},
};

struct Table {
  VariableKind kind;
  std::string_view title;
};

constexpr Table kTables[] = {
    {kUsers, "Yours"}, {kLaunchers, "Those that launchers set"}, {kOwn, "Between Trireme's own programs"}};

}  // namespace

std::span<const EnvironmentVariable> environment_variables() { return kVariables; }

std::optional<std::string> environment(std::string_view name) {
  const auto* const row = std::find_if(std::begin(kVariables), std::end(kVariables),
                                       [&](const EnvironmentVariable& one) { return one.name == name; });
  TRIREME_CHECK(row != std::end(kVariables), name, " is not in the list of src/base/environment.cpp");
  const char* const value = std::getenv(row->name.data());
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

std::string environment_page() {
  std::string page;
  for (const Table& table : kTables) {
    page += str("\n## ", table.title, "\n\n| variable | where it is not set | meaning |\n|---|---|---|\n");
    for (const EnvironmentVariable& one : kVariables)
      if (one.kind == table.kind) page += str("| `", one.name, "` | ", one.usual, " | ", one.meaning, " |\n");
  }
  return page;
}

}  // namespace trireme
