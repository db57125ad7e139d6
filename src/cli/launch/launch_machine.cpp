#include "cli/launch/launch_machine.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "cli/launch/rank_process.h"
#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/random_text.h"

namespace trireme::cli {
namespace {

// Binds `port` (0: any free one) and returns the port; 0 when it is taken.
int bind_port(int port) {
  const Fd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int one = 1;
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t bytes = sizeof(address);
  if (bind(listener.get(), generic, bytes) != 0 || getsockname(listener.get(), generic, &bytes) != 0) return 0;
  return ntohs(address.sin_port);
}

// The folder of the installation, or of the build tree, that the running program is in.
std::filesystem::path own_folder() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path();
}

// PYTHONPATH with the package of a build tree, which is not installed, behind what it names already. Empty: as it is.
std::string path_with_package() {
  const auto packages = own_folder() / "python";
  std::error_code none;
  bool is_built = false;
  for (const auto& entry : std::filesystem::directory_iterator(packages / "trireme", none))
    is_built =
        is_built || (entry.path().filename().string().starts_with("_core.") && entry.path().extension() == ".so");
  if (!is_built) return "";
  const std::string named = environment("PYTHONPATH").value_or("");
  return str(named, named.empty() ? "" : ":", packages.string());
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());  // more than 1024 cores: the set above is too small
}

std::string python_of_scripts() {
  if (const auto python = environment("TRIREME_PYTHON"); python && !python->empty()) return *python;
  // The file of a build tree: the build has left the file beside the program.
  std::ifstream file(own_folder() / "share" / "trireme" / "python");
  std::string built_for;
  return std::getline(file, built_for) ? built_for : LaunchMachine{}.python;
}

LaunchMachine this_machine() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  LaunchMachine machine{.host_name = name.data(), .cores = usable_cores(), .free_port = bind_port(0)};
  machine.has_omp_num_threads = environment("OMP_NUM_THREADS").has_value();
  machine.python = python_of_scripts();
  machine.python_path = path_with_package();
  if (!environment("TRIREME_TOKEN")) machine.token = random_text();
  if (machine.free_port == 0) throw IoError(str("no free port for rendezvous: ", std::strerror(errno)));
  return machine;
}

void check_port_is_free(int port) {
  if (bind_port(port) != 0) return;
  throw ConfigError(str("--master_port ", port, ": ", std::strerror(errno), "; leave the flag out to get a free port"));
}

void check_script(const LaunchRequest& request) {
  const std::string script = request.program.empty() ? "" : request.program[0];
  std::error_code ignored;
  if (request.kind != ProgramKind::kDetect || !script.ends_with(".py") || std::filesystem::exists(script, ignored))
    return;
  const std::filesystem::path folder = std::filesystem::current_path(ignored);
  throw ConfigError(str("script ", script, ": there is no such file",
                        script.starts_with('/') ? "" : str(" in ", folder.string()), "; correct its path"));
}

}  // namespace trireme::cli
