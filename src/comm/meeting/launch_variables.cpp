#include "comm/meeting/launch_variables.h"

#include <xxhash.h>

#include <charconv>
#include <cstdlib>
#include <limits>

#include "comm/meeting/meeting_address.h"
#include "trireme/base/environment.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

int parse_int(const std::string& name, const std::string& text, int least, int most) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
    throw ConfigError(str(name, "=", text, ": expected an integer in [", least, ", ", most, "]; set by the launcher"));
  return value;
}

constexpr int kMaxInt = std::numeric_limits<int>::max();

/// A port that the ranks of one job agree on without talking: below the range that the system hands out.
uint16_t port_of_job(const std::string& job) {
  return static_cast<uint16_t>(20000 + XXH3_64bits(job.data(), job.size()) % 12000);
}

class Reader;
/// How to run a program alone where a shell still has torchrun's variables; empty where it has none of them.
std::string left_over_advice(const Reader& read);

class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const std::string& name) const { return environment_(name); }
  bool has(const std::string& name) const { return environment_(name).has_value(); }
  int integer(const std::string& name, int least, int most) const {
    const auto value = environment_(name);
    if (!value)
      throw ConfigError(str(name,
                            " is not set, though other variables of the same launcher are; start the program with "
                            "torchrun, mpirun, srun or `trireme launch`",
                            left_over_advice(*this)));
    return parse_int(name, *value, least, most);
  }
  int integer_or(const std::string& name, int fallback, int most) const {
    return has(name) ? integer(name, 0, most) : fallback;
  }

 private:
  const Environment& environment_;
};

std::string left_over_advice(const Reader& read) {
  std::string found;
  std::string command = "env";
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    const auto value = read.text(name);
    if (!value) continue;
    found += str(found.empty() ? "" : ", ", name, "=", *value);
    command += str(" -u ", name);
  }
  if (found.empty()) return "";
  return str(". This process's environment says so: ", found,
             ". If no launcher has set that, it is left over in the shell: run the program alone by `", command,
             " PROGRAM`, or unset them");
}

void check_rank(const LaunchVariables& found, const char* rank_name, const char* size_name) {
  if (found.rank >= found.size)
    throw ConfigError(str(rank_name, "=", found.rank, ": expected less than ", size_name, "=", found.size));
}

/// MASTER_ADDR and MASTER_PORT, if they are set.
bool read_address(const Reader& read, LaunchVariables& found) {
  if (!read.has("MASTER_ADDR") && !read.has("MASTER_PORT")) return false;
  found.host = read.text("MASTER_ADDR").value_or("127.0.0.1");
  found.port = static_cast<uint16_t>(read.has("MASTER_PORT") ? read.integer("MASTER_PORT", 1, 65535) : 29500);
  found.meeting = Meeting::kAddress;
  return true;
}

[[noreturn]] void refuse_several_hosts(const std::string& ranks) {
  throw ConfigError(str(ranks,
                        ": init() joins ranks of one host. Start all ranks on one host, or join them through a process "
                        "group: in C++ by join(), in Python by torch.distributed.init_process_group() before "
                        "initialize()."),
                    ErrorCode::kUnsupported);
}

LaunchVariables read_torchrun(const Reader& read) {
  LaunchVariables found;
  found.size = read.integer("WORLD_SIZE", 1, kMaxInt);
  found.rank = read.integer("RANK", 0, kMaxInt);
  check_rank(found, "RANK", "WORLD_SIZE");
  found.local_rank = read.integer_or("LOCAL_RANK", found.rank, kMaxInt);
  // LOCAL_SIZE is what DeepSpeed's launcher sets.
  found.local_size = read.integer_or("LOCAL_WORLD_SIZE", read.integer_or("LOCAL_SIZE", found.size, kMaxInt), kMaxInt);
  found.all_here = found.local_size == found.size && (read.has("LOCAL_WORLD_SIZE") || read.has("LOCAL_SIZE"));
  found.attempt = read.text("TORCHELASTIC_RESTART_COUNT").value_or("0");
  found.launcher_serves = read.text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  if (found.size == 1) return found;
  found.advice = left_over_advice(read);
  if (!read_address(read, found))
    throw ConfigError(str("RANK and WORLD_SIZE=", found.size,
                          " are set but not MASTER_ADDR and MASTER_PORT, where the ranks meet; set "
                          "them (MASTER_ADDR=127.0.0.1 on one host), or use torchrun or `trireme launch`",
                          found.advice));
  return found;
}

LaunchVariables read_openmpi(const Reader& read) {
  LaunchVariables found;
  found.size = read.integer("OMPI_COMM_WORLD_SIZE", 1, kMaxInt);
  found.rank = read.integer("OMPI_COMM_WORLD_RANK", 0, kMaxInt);
  check_rank(found, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  found.local_rank = read.integer("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMaxInt);
  found.local_size = read.integer("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMaxInt);
  found.all_here = found.local_size == found.size;
  if (found.size == 1 || read_address(read, found)) return found;
  if (found.local_size != found.size)
    refuse_several_hosts(str(found.size, " ranks, ", found.local_size, " of them on this host"));
  const std::string job = read.text("PMIX_NAMESPACE").value_or(read.text("OMPI_MCA_ess_base_jobid").value_or(""));
  const auto folder = read.text("PMIX_SERVER_TMPDIR");
  if (job.empty())
    throw ConfigError(
        "mpirun has set neither PMIX_NAMESPACE nor OMPI_MCA_ess_base_jobid; set MASTER_ADDR and MASTER_PORT "
        "(mpirun -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 …)");
  if (folder) {
    found.meeting = Meeting::kFile;
    found.path = str(*folder, "/trireme-", port_of_job(job));
    return found;
  }
  found.meeting = Meeting::kAddress;
  found.host = "127.0.0.1";
  found.port = port_of_job("openmpi " + job);
  return found;
}

LaunchVariables read_slurm(const Reader& read) {
  LaunchVariables found;
  const char* size_name = read.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  found.size = read.integer(size_name, 1, kMaxInt);
  found.rank = read.integer("SLURM_PROCID", 0, kMaxInt);
  check_rank(found, "SLURM_PROCID", size_name);
  found.local_rank = read.integer("SLURM_LOCALID", 0, kMaxInt);
  const int nodes = read.integer_or("SLURM_STEP_NUM_NODES", read.integer_or("SLURM_NNODES", 1, kMaxInt), kMaxInt);
  found.local_size = found.size;  // of one node; several are refused, here or where the ranks meet
  found.all_here = nodes == 1 && (read.has("SLURM_STEP_NUM_NODES") || read.has("SLURM_NNODES"));
  found.attempt = read.text("SLURM_RESTART_COUNT").value_or("0");
  if (found.size == 1 || read_address(read, found)) return found;
  if (nodes > 1) {
    const auto names = read.text("SLURM_STEP_NODELIST");
    refuse_several_hosts(str(found.size, " ranks on ", nodes, " nodes", names ? str(" (", *names, ")") : ""));
  }
  found.meeting = Meeting::kAddress;
  found.host = "127.0.0.1";
  found.port = port_of_job(str("slurm ", read.text("SLURM_JOB_ID").value_or(""), ".", *read.text("SLURM_STEP_ID")));
  return found;
}

std::chrono::milliseconds read_seconds(const Environment& environment, const std::string& name,
                                       std::chrono::milliseconds fallback) {
  const auto text = environment(name);
  if (!text) return fallback;
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  if (text->empty() || *end != 0 || !(seconds > 0) || seconds > 1e9)
    throw ConfigError(str(name, "=", *text, ": expected a positive number of seconds"));
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

LaunchVariables read_launcher(const Reader& read) {
  if (read.has("RANK") || read.has("WORLD_SIZE")) return read_torchrun(read);
  if (read.has("OMPI_COMM_WORLD_SIZE")) return read_openmpi(read);
  // A batch script has SLURM_PROCID too; only a program started by srun is one of several ranks.
  if (read.has("SLURM_PROCID") && read.has("SLURM_STEP_ID")) return read_slurm(read);
  return {};
}

}  // namespace

std::string LaunchVariables::meeting_host() const {
  return all_here && !launcher_serves && !says_loopback(host) ? "127.0.0.1" : host;
}

Environment process_environment() {
  return [](const std::string& name) { return environment(name); };
}

LaunchVariables read_launch_variables(const Environment& environment) {
  LaunchVariables found = read_launcher(Reader(environment));
  if (found.meeting != Meeting::kAlone) found.token = read_token(environment);
  return found;
}

std::string read_token(const Environment& environment) {
  const auto token = environment("TRIREME_TOKEN");
  if (token && token->empty())
    throw ConfigError(
        "TRIREME_TOKEN is set, and empty; give every rank one secret, as `openssl rand -hex 16` makes them, or unset "
        "it");
  return token.value_or("");
}

Transport read_transport(const Environment& environment, Transport fallback) {
  const auto text = environment("TRIREME_COMM");
  if (!text) return fallback;
  if (*text == "auto") return Transport::kAuto;
  if (*text == "shm") return Transport::kShm;
  if (*text == "c10d") return Transport::kC10d;
  throw ConfigError(str("TRIREME_COMM=", *text, ": expected auto, shm or c10d"));
}

WaitLimits read_limits(const Environment& environment, std::chrono::milliseconds timeout) {
  const WaitLimits usual;
  return {.timeout = read_seconds(environment, "TRIREME_TIMEOUT_S", timeout),
          .resolve = read_seconds(environment, "TRIREME_RESOLVE_TIMEOUT_S", usual.resolve),
          .warn_after = read_seconds(environment, "TRIREME_WARN_AFTER_S", usual.warn_after)};
}

}  // namespace trireme::comm
