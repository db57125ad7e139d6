#include "cli/launch/foreign_flags.h"

#include <algorithm>
#include <map>

#include "cli/launch/launch_plan.h"
#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

constexpr const char* kRanks = "write --num_gpus N for N ranks on this machine";
constexpr const char* kOneHost = "leave it out";  // and kSeveralHosts
constexpr const char* kMeeting =
    "leave it out: ranks meet at a free port of this machine (--master_addr and --master_port choose another place)";
constexpr const char* kNoRestart =
    "leave it out: when a rank fails the job ends; start it again, with the checkpoint that the program loads";
constexpr const char* kLogs = "write --log-dir DIR for a file of each rank's output";
constexpr const char* kOfPlugin = "leave it out: it stands in the configuration that the program gives to initialize()";
constexpr const char* kOfProgram = "write it behind the program, whose argument it is";
constexpr const char* kCores = "leave it out: OMP_NUM_THREADS is cores / ranks; `taskset` chooses cores";
constexpr const char* kNotThere = "it is not there yet; leave it out";

// Without dashes in front, and with - between words.
const std::map<std::string, const char*>& advices() {
  static const std::map<std::string, const char*> all = {
      {"nproc-per-node", kRanks},
      {"num-processes", kRanks},
      {"n", kRanks},
      {"np", kRanks},
      {"nnodes", kOneHost},
      {"num-machines", kOneHost},
      {"node-rank", kOneHost},
      {"machine-rank", kOneHost},
      {"same-network", kOneHost},
      {"launcher", kOneHost},
      {"launcher-args", kOneHost},
      {"ssh-port", kOneHost},
      {"no-ssh", kOneHost},
      {"no-ssh-check", kOneHost},
      {"force-multi", kOneHost},
      {"host", kOneHost},
      {"standalone", kMeeting},
      {"rdzv-backend", kMeeting},
      {"rdzv-endpoint", kMeeting},
      {"rdzv-id", kMeeting},
      {"rdzv-conf", kMeeting},
      {"local-addr", kMeeting},
      {"main-process-ip", "write --master_addr ADDRESS"},
      {"main-process-port", "write --master_port PORT"},
      {"max-restarts", kNoRestart},
      {"monitor-interval", kNoRestart},
      {"redirects", kLogs},
      {"r", kLogs},
      {"tee", kLogs},
      {"t", kLogs},
      {"enable-each-rank-log", kLogs},
      {"local-ranks-filter", "write --prefix others or none; --log-dir DIR has every rank's output"},
      {"gpu-ids", "write --include localhost:0,1"},
      {"use-deepspeed", "write --as-deepspeed"},
      {"use-fsdp", "write --as-fsdp"},
      {"multi-gpu", "leave it out; --num_gpus N says how many"},
      {"cpu", "leave it out, and set TRIREME_DEVICE=cpu"},
      {"use-cpu", "leave it out, and set TRIREME_DEVICE=cpu"},
      {"deepspeed", kOfProgram},
      {"deepspeed-config", kOfProgram},
      {"config-file", kOfPlugin},
      {"deepspeed-config-file", kOfPlugin},
      {"zero-stage", kOfPlugin},
      {"mixed-precision", kOfPlugin},
      {"bind-cores-to-rank", kCores},
      {"bind-core-list", kCores},
      {"num-cpu-threads-per-process", "leave it out, and set OMP_NUM_THREADS=N"},
      {"start-method", "leave it out: ranks are processes of their own"},
      {"role", "leave it out"},
      {"run-path", "leave it out"},
      {"autotuning", kNotThere},
      {"elastic-training", kNotThere},
      {"min-elastic-nodes", kNotThere},
      {"max-elastic-nodes", kNotThere},
  };
  return all;
}

}  // namespace

std::optional<std::string> advice_for_flag(const std::string& flag) {
  std::string name = flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
  std::replace(name.begin(), name.end(), '_', '-');
  const auto found = advices().find(name);
  if (found == advices().end()) return std::nullopt;
  return found->second == kOneHost ? str(kOneHost, ": ", kSeveralHosts) : found->second;
}

}  // namespace trireme::cli
