#include "cli/launch/launch_plan.h"

#include <algorithm>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"

namespace trireme::cli {
namespace {

void check_flags(const LaunchRequest& request) {
  if (request.program.empty()) {
    throw ConfigError("no program given; write it after the flags, such as --num_gpus 2 ./my_program --epochs 3");
  }
  const bool selects = !request.include.empty() || !request.exclude.empty();
  if (selects && (request.ranks_per_node || request.nodes)) {
    throw ConfigError(
        "--num_gpus and --num_nodes cannot be combined with --include or --exclude; the slots say how many ranks run");
  }
  if (request.ranks_per_node && *request.ranks_per_node < 1) {
    throw ConfigError(str("--num_gpus ", *request.ranks_per_node, ": at least one rank is needed"));
  }
  if (request.nodes && *request.nodes < 1)
    throw ConfigError(str("--num_nodes ", *request.nodes, ": at least 1 is needed"));
  if (request.master_port && (*request.master_port < 1 || *request.master_port > 65535)) {
    throw ConfigError(str("--master_port ", *request.master_port, ": a port is a number from 1 to 65535"));
  }
}

std::vector<int> first_slots(int count) {
  std::vector<int> slots(count);
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

// Without a host file this machine has as many slots as are asked for; --include and --exclude choose among its cores.
std::vector<HostSlots> pool_of(const LaunchRequest& request, const LaunchMachine& machine) {
  if (!request.hosts.empty()) return request.hosts;
  const bool selects = !request.include.empty() || !request.exclude.empty();
  return {{"localhost", first_slots(selects ? machine.cores : request.ranks_per_node.value_or(1))}};
}

bool is_this_machine(const std::string& host, const std::string& own_name) {
  if (host == "localhost" || host == "127.0.0.1" || host == "::1" || host == own_name) return true;
  return host.substr(0, host.find('.')) == own_name.substr(0, own_name.find('.')) &&
         host.find_first_not_of("0123456789.") != std::string::npos;
}

std::string origin_of(const LaunchRequest& request) {
  return request.hosts_file.empty() ? "" : request.hosts_file + ": ";
}

// The fix depends on whether the host file has this machine, under any of its names.
[[noreturn]] void refuse_host(const std::string& host, const LaunchRequest& request, const LaunchMachine& machine) {
  const auto own = std::find_if(request.hosts.begin(), request.hosts.end(),
                                [&](const HostSlots& one) { return is_this_machine(one.host, machine.host_name); });
  const std::string fix = own != request.hosts.end() ? str("keep to this one with --include ", own->host)
                                                     : "leave the host file out, or write `localhost slots=N` into it";
  throw ConfigError(str(origin_of(request), "host '", excerpt(host), "' is not this machine ('", machine.host_name,
                        "'); ", fix, ": ", kSeveralHosts),
                    ErrorCode::kUnsupported);
}

std::vector<int> slots_to_run(const LaunchRequest& request, const LaunchMachine& machine) {
  auto hosts = select_slots(pool_of(request, machine), request.include, request.exclude);
  if (request.nodes && *request.nodes > static_cast<int>(hosts.size())) {
    throw ConfigError(str("--num_nodes ", *request.nodes, ": only ", hosts.size(),
                          " host is known; leave the flag out: ", kSeveralHosts),
                      ErrorCode::kUnsupported);
  }
  if (request.nodes) hosts.resize(*request.nodes);
  for (const auto& one : hosts) {
    if (!is_this_machine(one.host, machine.host_name)) refuse_host(one.host, request, machine);
  }
  if (hosts.size() > 1) {
    throw ConfigError(str(origin_of(request), "'", hosts[0].host, "' and '", hosts[1].host,
                          "' are both this machine; give its slots in one line"));
  }
  auto slots = hosts.front().slots;
  if (request.ranks_per_node) {
    if (*request.ranks_per_node > static_cast<int>(slots.size())) {
      throw ConfigError(str("--num_gpus ", *request.ranks_per_node, ": host '", hosts.front().host, "' has ",
                            slots.size(), " slots in the host file"));
    }
    slots.resize(*request.ranks_per_node);
  }
  return slots;
}

bool is_python(const std::string& word) {
  const std::string name = word.substr(word.find_last_of('/') + 1);
  return name.starts_with("python") && name.find_first_not_of("python0123456789.") == std::string::npos;
}

// `PYTHON [its flags] -m trireme.as_NAME PROGRAM …`, with the Python that the program begins with, if it does.
std::vector<std::string> with_names_of(const std::string& name, const LaunchRequest& request,
                                       const LaunchMachine& machine) {
  std::vector<std::string> argv = request.program;
  size_t flags_end = 0;
  if (request.kind == ProgramKind::kDetect && is_python(argv[0])) {
    for (flags_end = 1; flags_end < argv.size() && argv[flags_end].starts_with("-"); ++flags_end) {
      if (argv[flags_end] == "-m" || argv[flags_end] == "-c") break;
      if (argv[flags_end] == "-X" || argv[flags_end] == "-W") ++flags_end;  // its value is a word of its own
    }
    if (flags_end >= argv.size() || argv[flags_end] == "-c")
      throw ConfigError(str(
          "--as-", name, ": Python needs a script or a module, as in: python3 train.py, or python3 -m package.train"));
  } else {
    if (request.kind == ProgramKind::kModule) argv.insert(argv.begin(), "-m");
    argv.insert(argv.begin(), {machine.python, "-u"});
    flags_end = 2;
  }
  argv.insert(argv.begin() + static_cast<std::ptrdiff_t>(flags_end), {"-m", "trireme.as_" + name});
  return argv;
}

std::vector<std::string> command_line(const LaunchRequest& request, const LaunchMachine& machine) {
  if (!request.names_of.empty()) return with_names_of(request.names_of, request, machine);
  std::vector<std::string> argv = request.program;
  const bool is_script = request.kind == ProgramKind::kDetect && argv[0].ends_with(".py");
  // -u: a rank's output goes through a pipe, and Python would hold it back until it has 8 KiB.
  if (request.kind == ProgramKind::kModule) argv.insert(argv.begin(), {machine.python, "-u", "-m"});
  if (is_script) argv.insert(argv.begin(), {machine.python, "-u"});
  return argv;
}

}  // namespace

std::vector<RankCommand> plan_launch(const LaunchRequest& request, const LaunchMachine& machine) {
  check_flags(request);
  const auto slots = slots_to_run(request, machine);
  const int size = static_cast<int>(slots.size());
  std::string devices;
  for (const int slot : slots) devices += str(devices.empty() ? "" : ",", slot);

  std::vector<RankCommand> commands;
  for (int rank = 0; rank < size; ++rank) {
    auto own = request;
    if (request.passes_local_rank) own.program.insert(own.program.begin() + 1, str("--local_rank=", rank));
    RankCommand command{command_line(own, machine),
                        {{"RANK", std::to_string(rank)},
                         {"LOCAL_RANK", std::to_string(rank)},
                         {"WORLD_SIZE", std::to_string(size)},
                         {"LOCAL_WORLD_SIZE", std::to_string(size)},
                         {"LOCAL_SIZE", std::to_string(size)},
                         {"GROUP_RANK", "0"},
                         {"MASTER_ADDR", request.master_addr.empty() ? "127.0.0.1" : request.master_addr},
                         {"MASTER_PORT", std::to_string(request.master_port.value_or(machine.free_port))}}};
    if (!machine.python_path.empty()) command.environment.emplace_back("PYTHONPATH", machine.python_path);
    if (!machine.token.empty()) command.environment.emplace_back("TRIREME_TOKEN", machine.token);
    if (!machine.has_omp_num_threads) {
      command.environment.emplace_back("OMP_NUM_THREADS", std::to_string(std::max(1, machine.cores / size)));
    }
    if (!request.include.empty() || !request.exclude.empty()) {
      command.environment.emplace_back("CUDA_VISIBLE_DEVICES", devices);
    }
    commands.push_back(std::move(command));
  }
  return commands;
}

}  // namespace trireme::cli
