// Runs a benchmark's own program again as the ranks of a job.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/base/error.h"

namespace benchmarks {

struct OwnRanks {
  int ranks = 2;
  int threads = 1;
  std::string program;             ///< argv[0]
  std::vector<std::string> flags;  ///< of every rank
};

/// True in a process that run_own_ranks() has started.
inline bool is_own_rank() { return std::getenv("RANK") != nullptr; }

/// Starts the ranks, each of which finds its place through trireme::init(), and returns the JSON that rank 0 printed.
inline nlohmann::ordered_json run_own_ranks(const OwnRanks& job) {
  static int port = 23000 + getpid() % 20000;
  ++port;
  int pipe_ends[2];
  TRIREME_CHECK(pipe(pipe_ends) == 0, "pipe");
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < job.ranks; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      ranks.push_back(child);
      continue;
    }
    dup2(pipe_ends[1], STDOUT_FILENO);
    const std::map<std::string, int> variables = {{"RANK", rank},
                                                  {"LOCAL_RANK", rank},
                                                  {"WORLD_SIZE", job.ranks},
                                                  {"LOCAL_WORLD_SIZE", job.ranks},
                                                  {"MASTER_PORT", port},
                                                  {"OMP_NUM_THREADS", job.threads},
                                                  {"MKL_NUM_THREADS", job.threads}};
    for (const auto& [name, value] : variables) setenv(name.c_str(), std::to_string(value).c_str(), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    std::vector<char*> argv = {const_cast<char*>(job.program.c_str())};
    for (const std::string& flag : job.flags) argv.push_back(const_cast<char*>(flag.c_str()));
    argv.push_back(nullptr);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  close(pipe_ends[1]);
  std::string output;
  char buffer[4096];
  for (ssize_t n; (n = read(pipe_ends[0], buffer, sizeof buffer)) > 0;) output.append(buffer, n);
  close(pipe_ends[0]);
  bool failed = false;
  for (const pid_t rank : ranks) {
    int status = 0;
    waitpid(rank, &status, 0);
    failed |= status != 0;
  }
  if (failed) throw trireme::Error(trireme::ErrorCode::kInternal, "a rank of the benchmark failed");
  return nlohmann::ordered_json::parse(output);
}

}  // namespace benchmarks
