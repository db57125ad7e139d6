// `trireme launch`: starts a program as several ranks on this machine. `trireme deepspeed`: the same, as DeepSpeed's
// launcher does.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "cli/command.h"
#include "cli/flags.h"
#include "cli/launch/deepspeed_command.h"
#include "cli/launch/launch_machine.h"
#include "cli/launch/pid_file.h"
#include "cli/launch/supervisor.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/json_limits.h"
#include "trireme/device/device.h"

namespace trireme::cli {
namespace {

constexpr const char* kLaunchFooter =
    "Examples:\n"
    "  trireme launch --num_gpus 2 ./my_program --epochs 3\n"
    "  trireme launch --hostfile hosts.txt --include worker-0:0,2 ./my_program\n"
    "  trireme launch --num_gpus 2 -m my_package.train --lr 1e-3\n"
    "  trireme launch --num_gpus 2 --as-deepspeed train.py --deepspeed ds_config.json\n\n"
    "The flags are those of the `deepspeed` launcher; the ranks get torchrun's variables (RANK, LOCAL_RANK, "
    "WORLD_SIZE,\n"
    "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and OMP_NUM_THREADS = cores / ranks unless it is set. When a rank "
    "fails,\n"
    "the others are ended, its last lines are repeated at the end, and its exit code is returned (128 + signal).";

struct LaunchFlags {
  const char* name = "trireme launch";
  LaunchRequest request;
  std::string hostfile;
  Prefix prefix = Prefix::kAll;
  double grace_s = 15;
  bool no_python = false;
  bool module = false;
  bool no_local_rank = false;
  bool save_pid = false;
  std::string log_dir;
};

void declare(CLI::App& app, LaunchFlags& flags) {
  auto& request = flags.request;
  add_whole(app, "--num_gpus,--num_ranks,--num_accelerators", request.ranks_per_node,
            "ranks per node (default: 1, or the slots of the host file)", {.most = 65535})
      ->group("Ranks");
  add_whole(app, "--num_nodes", request.nodes, "use the first N hosts of the host file", {.most = 65535})
      ->group("Ranks");
  app.add_option("-H,--hostfile", flags.hostfile, "file of `host slots=N` lines")->type_name("FILE")->group("Ranks");
  app.add_option("-i,--include", request.include, "run only on these slots, as in host:0,2@other")
      ->type_name("SLOTS")
      ->group("Ranks");
  app.add_option("-e,--exclude", request.exclude, "run on all slots but these")->type_name("SLOTS")->group("Ranks");
  app.add_option("--master_addr,--master-addr", request.master_addr, "address for rendezvous (default: 127.0.0.1)")
      ->type_name("ADDRESS")
      ->group("Rendezvous");
  add_whole(app, "--master_port,--master-port", request.master_port, "port for rendezvous (default: a free one)",
            {.most = 65535})
      ->group("Rendezvous");
  auto* no_python =
      app.add_flag("--no_python,--no-python", flags.no_python, "run PROGRAM as it is, even when it ends in .py")
          ->group("Program");
  app.add_flag("-m,--module", flags.module,
               "PROGRAM is a Python module: python3 -u -m PROGRAM (TRIREME_PYTHON names another Python)")
      ->excludes(no_python)
      ->group("Program");
  const auto add_names_of = [&](const char* flag, const char* name, const char* help) {
    return app
        .add_flag_callback(
            flag, [&request, name] { request.names_of = name; }, help)
        ->excludes(no_python)
        ->group("Program");
  };
  auto* as_deepspeed =
      add_names_of("--as-deepspeed", "deepspeed",
                   "PROGRAM is Python, and `import deepspeed` in it means trireme (Hugging Face's packages too)");
  auto* as_fsdp = add_names_of("--as-fsdp", "fsdp",
                               "PROGRAM is Python, and `fully_shard` of torch.distributed.fsdp in it means trireme's");
  add_names_of("--as-smp", "smp",
               "PROGRAM is Python, and `import smdistributed.modelparallel.torch` in it means trireme.smp")
      ->excludes(as_deepspeed, as_fsdp);
  as_fsdp->excludes(as_deepspeed);
  app.add_flag("--no_local_rank", flags.no_local_rank,
               "accepted; --local_rank is never added to the arguments, read LOCAL_RANK")
      ->group("Program");
  const std::map<std::string, Prefix> prefixes = {
      {"all", Prefix::kAll}, {"others", Prefix::kAllButFirst}, {"none", Prefix::kNone}};
  app.add_option_function<std::string>(
         "--prefix", [&flags, prefixes](const std::string& name) { flags.prefix = prefixes.at(name); },
         "whose lines open with [rank N]: all, others (not rank 0's), none (default: all; of `trireme deepspeed` none)")
      ->check(one_of({"all", "others", "none"}))
      ->type_name("WHICH")
      ->group("Output");
  app.add_option("--log-dir,--log_dir", flags.log_dir, "folder for rank-N.log: all that rank N writes")
      ->type_name("DIR")
      ->group("Output");
  app.add_flag("--save_pid,--save-pid", flags.save_pid,
               "keep the launcher's process number in /tmp/NUMBER.ds meanwhile")
      ->group("Output");
  add_real(app, "--grace", flags.grace_s, "seconds from SIGTERM to SIGKILL", {.most = 1e6})
      ->capture_default_str()
      ->group("Output");
}

int run_launch(const LaunchFlags& flags, LaunchRequest request) {
  if (!flags.hostfile.empty()) {
    request.hosts = parse_hostfile(read_input([&] { return read_config_text(flags.hostfile); }), flags.hostfile);
    request.hosts_file = flags.hostfile;
  }
  check_script(request);
  if (request.master_port) check_port_is_free(*request.master_port);
  SupervisorOptions options{.name = flags.name, .prefix = flags.prefix, .log_dir = flags.log_dir};
  options.grace = std::chrono::milliseconds(static_cast<int64_t>(flags.grace_s * 1000));
  Supervisor supervisor(plan_launch(request, this_machine()), options);
  std::optional<PidFile> pid_file;
  if (flags.save_pid) pid_file.emplace();
  return supervisor.run().exit_code;
}

LaunchRequest request_of(const LaunchFlags& flags, const Invocation& invocation) {
  auto request = flags.request;
  request.program = invocation.program;
  request.kind = flags.module ? ProgramKind::kModule : flags.no_python ? ProgramKind::kProgram : ProgramKind::kDetect;
  return request;
}

constexpr const char* kDeepspeedFooter =
    "Examples:\n"
    "  CUDA_VISIBLE_DEVICES=0 trireme deepspeed --master_port 29520 train.py --ds_file ds_zero2.json\n"
    "  trireme deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds_config.json\n"
    "  trireme deepspeed --install     makes the command `deepspeed`, where there is none\n\n"
    "What `trireme launch --as-deepspeed` does, with the defaults of DeepSpeed's launcher: a rank for every visible "
    "GPU\n"
    "(without a GPU: LOCAL_SIZE ranks, or 1), --local_rank=N as the program's first argument, and the ranks' lines as\n"
    "they are. Ranks run on this machine, so flags about other machines change nothing.";

// How many ranks DeepSpeed's launcher starts where nothing says it: one for each device.
int devices_of_this_machine() {
  const int gpus = count_gpus();
  if (gpus > 0) return gpus;
  const auto text = environment("LOCAL_SIZE");
  return text ? std::max(1, std::atoi(text->c_str())) : 1;
}

int run_deepspeed(const LaunchFlags& flags, const Invocation& invocation) {
  auto request = request_of(flags, invocation);
  if (!flags.no_python) request.names_of = "deepspeed";
  request.passes_local_rank = !flags.no_local_rank;
  const bool says_ranks =
      request.ranks_per_node || !flags.hostfile.empty() || !request.include.empty() || !request.exclude.empty();
  if (!says_ranks) request.ranks_per_node = devices_of_this_machine();
  return run_launch(flags, request);
}

}  // namespace

Action add_launch(CLI::App& app) {
  const auto flags = std::make_shared<LaunchFlags>();
  declare(app, *flags);
  app.footer(kLaunchFooter);
  return [flags](const Invocation& invocation) { return run_launch(*flags, request_of(*flags, invocation)); };
}

Action add_deepspeed(CLI::App& app) {
  const auto flags = std::make_shared<LaunchFlags>();
  flags->name = "trireme deepspeed";
  flags->prefix = Prefix::kNone;
  declare(app, *flags);
  app.get_option("--no_local_rank")->description("do not pass --local_rank=N to the program");
  const auto installs = std::make_shared<bool>(false);
  app.add_flag("--install", *installs, "make a command `deepspeed` beside this one, and start nothing");
  const auto ignored_flag = std::make_shared<bool>(false);
  const auto ignored_value = std::make_shared<std::string>();
  app.add_flag("--no_ssh_check,--no_ssh,--force_multi,-q,--quiet", *ignored_flag, "accepted; changes nothing here")
      ->group("Other machines");
  app.add_option("--launcher,--launcher_args,--ssh_port,--venv_script,--node_rank,--log_level", *ignored_value,
                 "accepted; changes nothing here")
      ->type_name("VALUE")
      ->group("Other machines");
  app.footer(kDeepspeedFooter);
  return [flags, installs, ignored_flag, ignored_value](const Invocation& invocation) {
    if (!*installs) return run_deepspeed(*flags, invocation);
    print_result(install_deepspeed_command() + "\n");
    return static_cast<int>(kDone);
  };
}

}  // namespace trireme::cli
