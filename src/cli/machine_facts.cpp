#include "cli/machine_facts.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "cli/launch/launch_machine.h"
#include "cli/launch/rank_process.h"
#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/version.h"
#include "trireme/device/nvidia_library.h"

extern char** environ;

namespace trireme::cli {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = __VERSION__;  // names itself
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

constexpr int64_t kEnoughShm = int64_t{1} << 30;
constexpr int64_t kEnoughFiles = 1024;

std::string text_of_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The first group of `pattern` in `text`, or nothing.
std::string found_in(const std::string& text, const char* pattern) {
  std::smatch match;
  return std::regex_search(text, match, std::regex(pattern)) ? match[1].str() : "";
}

// PyTorch's own record beside its libraries. A libtorch without Python has none.
std::string torch_record() { return text_of_file(torch_libraries().parent_path() / "version.py"); }

std::string torch_version() {
  const std::string version = found_in(torch_record(), "__version__ = '([^']+)'");
  return version.empty() ? TORCH_VERSION : version;
}

std::string cuda_of_torch() {
  const std::string version = found_in(torch_record(), "\ncuda[^=\n]*= '([^']+)'");
  std::error_code unreadable;
  const bool is_there = std::filesystem::exists(torch_libraries() / "libtorch_cuda.so", unreadable);
  return version.empty() && is_there ? "of a version that it does not tell" : version;
}

std::string nccl_version() {
  std::string problem;
  void* library = open_nvidia_library("libnccl.so.2", "nccl", problem);
  const auto get = library != nullptr ? reinterpret_cast<int (*)(int*)>(::dlsym(library, "ncclGetVersion")) : nullptr;
  int code = 0;
  if (get == nullptr || get(&code) != 0) return "";
  return str(code / 10000, ".", code / 100 % 100, ".", code % 100);  // as of 2.9
}

LimitFacts limit_of(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<decltype(RLIMIT_NOFILE)>(resource), &limit) != 0) return {};
  const auto bounded = [](rlim_t value) {
    return value == RLIM_INFINITY ? std::nullopt : std::optional(static_cast<int64_t>(value));
  };
  return {bounded(limit.rlim_cur), bounded(limit.rlim_max)};
}

std::optional<ShmFacts> shm_facts() {
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) != 0) return std::nullopt;
  const auto block = static_cast<int64_t>(shm.f_frsize);
  return ShmFacts{.bytes = block * static_cast<int64_t>(shm.f_blocks),
                  .free_bytes = block * static_cast<int64_t>(shm.f_bavail)};
}

int64_t free_memory() {
  const std::string kilobytes = found_in(text_of_file("/proc/meminfo"), "MemAvailable: *([0-9]+) kB");
  return kilobytes.empty() ? 0 : std::stoll(kilobytes) * 1024;
}

bool has_infiniband() {
  std::error_code none;
  return !std::filesystem::is_empty("/sys/class/infiniband", none) && !none;
}

std::string limit_text(const std::optional<int64_t>& limit, bool is_bytes) {
  if (!limit) return "unlimited";
  return is_bytes ? size_text(static_cast<double>(*limit)) : std::to_string(*limit);
}

std::string row(const std::string& name, const std::string& value) { return formatted("{:<11} {}\n", name, value); }

std::string gpus_text(const GpuList& list) {
  if (list.gpus.empty()) return row("GPUs", "none: " + list.problem);
  std::string text;
  for (size_t i = 0; i < list.gpus.size(); ++i)
    text += row(str("cuda:", i), str(list.gpus[i].name, ", ", size_text(static_cast<double>(list.gpus[i].bytes))));
  return text;
}

Json json_of(const LimitFacts& limit) {
  const auto value = [](const std::optional<int64_t>& bound) { return bound ? Json(*bound) : Json(); };
  return {{"soft", value(limit.soft)}, {"hard", value(limit.hard)}};
}

Json json_of(const std::vector<std::pair<std::string, std::string>>& pairs) {
  Json json = Json::object();
  for (const auto& [name, value] : pairs) json[name] = value.empty() ? Json() : Json(value);
  return json;
}

std::vector<std::pair<std::string, std::string>> variables_that_are_set() {
  std::vector<std::pair<std::string, std::string>> set;
  for (const EnvironmentVariable& variable : environment_variables()) {
    const auto value = environment(variable.name);
    if (value) set.emplace_back(variable.name, variable.name == "TRIREME_TOKEN" ? "(a secret)" : *value);
  }
  return set;
}

}  // namespace

std::string first_line_of(const std::vector<std::string>& command) {
  Pipe pipe = make_pipe();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe.write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  std::vector<std::string> words = command;
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  pipe.write_end.reset();
  if (failed != 0) return "";
  std::string text;
  char buffer[4096];
  for (ssize_t bytes; (bytes = read(pipe.read_end.get(), buffer, sizeof(buffer))) > 0;)
    text.append(buffer, static_cast<size_t>(bytes));
  int status = 0;
  waitpid(child, &status, 0);
  return text.substr(0, text.find('\n'));
}

MachineFacts machine_facts() {
  const std::string python = python_of_scripts();
  const std::string version = first_line_of({python, "--version"});
  return {.versions = {{"trireme", kVersion},
                       {"torch", torch_version()},
                       {"compiler", kCompiler},
                       {"python", version.empty() ? "" : str(found_in(version, "Python (.*)"), " (", python, ")")},
                       {"cuda", cuda_of_torch()},
                       {"nccl", nccl_version()},
                       {"mpi", first_line_of({"mpirun", "--version"})}},
          .gpus = list_gpus(),
          .has_infiniband = has_infiniband(),
          .memory_bytes = total_memory(c10::Device(c10::kCPU)),
          .free_memory_bytes = free_memory(),
          .cores = usable_cores(),
          .shm = shm_facts(),
          .open_files = limit_of(RLIMIT_NOFILE),
          .locked_bytes = limit_of(RLIMIT_MEMLOCK),
          .variables = variables_that_are_set()};
}

std::vector<std::string> hindrances(const MachineFacts& facts) {
  std::vector<std::string> sentences;
  constexpr const char* kUsers = "workers of a DataLoader and NCCL pass data through it";
  constexpr const char* kShmFix =
      "start the container with --shm-size=8g or --ipc=host, or as root "
      "mount -o remount,size=8G /dev/shm";
  if (!facts.shm) sentences.push_back(str("/dev/shm is not there, and ", kUsers, ": mount a tmpfs on it"));
  if (facts.shm && facts.shm->free_bytes < kEnoughShm)
    sentences.push_back(str("/dev/shm has ", size_text(static_cast<double>(facts.shm->free_bytes)), " free of ",
                            size_text(static_cast<double>(facts.shm->bytes)), ", and ", kUsers, ": ", kShmFix));
  if (facts.locked_bytes.soft && facts.has_infiniband)
    sentences.push_back(str("at most ", size_text(static_cast<double>(*facts.locked_bytes.soft)),
                            " may be locked in memory, and NCCL registers more for InfiniBand: ulimit -l unlimited, or "
                            "start the container with --ulimit memlock=-1"));
  if (facts.open_files.soft && *facts.open_files.soft < kEnoughFiles)
    sentences.push_back(str("at most ", *facts.open_files.soft,
                            " files may be open, and each peer of a rank takes some: ulimit -n ",
                            facts.open_files.hard ? std::min<int64_t>(65536, *facts.open_files.hard) : 65536));
  return sentences;
}

std::string text_of(const MachineFacts& facts) {
  std::string text;
  for (const auto& [name, version] : facts.versions) text += row(name, version.empty() ? "not found" : version);
  text += "\n" + gpus_text(facts.gpus);
  text += row("memory", str(size_text(static_cast<double>(facts.memory_bytes)), ", ",
                            size_text(static_cast<double>(facts.free_memory_bytes)), " free"));
  text += row("cores", std::to_string(facts.cores));
  text += row("/dev/shm", facts.shm ? str(size_text(static_cast<double>(facts.shm->bytes)), ", ",
                                          size_text(static_cast<double>(facts.shm->free_bytes)), " free")
                                    : "not there");
  text += row("ulimit -n", str("open files: ", limit_text(facts.open_files.soft, false), ", at most ",
                               limit_text(facts.open_files.hard, false)));
  text += row("ulimit -l", str("locked memory: ", limit_text(facts.locked_bytes.soft, true), ", at most ",
                               limit_text(facts.locked_bytes.hard, true)));
  text += "\n";
  if (facts.variables.empty()) text += "No variable of `trireme docs environment` is set.\n";
  for (const auto& [name, value] : facts.variables) text += str(name, "=", value, "\n");
  for (const std::string& sentence : hindrances(facts)) text += str("\nwarning: ", sentence, "\n");
  return text;
}

Json json_of(const MachineFacts& facts) {
  Json gpus = Json::array();
  for (const GpuFacts& gpu : facts.gpus.gpus) gpus.push_back({{"name", gpu.name}, {"bytes", gpu.bytes}});
  return {{"versions", json_of(facts.versions)},
          {"gpus", gpus},
          {"memory_bytes", facts.memory_bytes},
          {"free_memory_bytes", facts.free_memory_bytes},
          {"cores", facts.cores},
          {"shm_bytes", facts.shm ? Json(facts.shm->bytes) : Json()},
          {"free_shm_bytes", facts.shm ? Json(facts.shm->free_bytes) : Json()},
          {"open_files", json_of(facts.open_files)},
          {"locked_bytes", json_of(facts.locked_bytes)},
          {"variables", json_of(facts.variables)},
          {"hindrances", hindrances(facts)}};
}

}  // namespace trireme::cli
