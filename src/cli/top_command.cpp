// `trireme top`: what the ranks of a running job do.
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <chrono>
#include <memory>
#include <thread>

#include "cli/command.h"
#include "cli/flags.h"
#include "cli/job_view.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"
#include "trireme/base/stop_signals.h"
#include "trireme/observe/run_status.h"

namespace trireme::cli {
namespace {

constexpr const char* kTopFooter =
    "RUN is the process id of a rank or of the launcher, the folder that a run writes to (--out), or the job's name;\n"
    "without it the only job there is. The job needs no flag: every rank of this user tells what it does to who asks.\n"
    "On a terminal the table is drawn again every second until Ctrl-C, or until the job has ended.\n\n"
    "Examples:\n"
    "  trireme top\n"
    "  trireme top runs/llama-3m\n"
    "  trireme top 4711 --once";

constexpr std::chrono::milliseconds kPatience{300};
constexpr int kWidest = 1000;

struct TopFlags {
  std::string run;
  bool once = false;
  double interval_s = 1;
};

int columns_of_terminal() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

int run_top(const TopFlags& flags) {
  const bool redraws = ::isatty(STDOUT_FILENO) == 1 && !flags.once;
  std::vector<ProcessNow> job = job_of(processes_now(kPatience), flags.run);
  if (!redraws) {
    print_result(text_of(job, kWidest));
    return kDone;
  }
  const StopSignals signals;
  const std::string name = job.front().job;
  while (true) {
    print_result("\x1b[H\x1b[2J" + text_of(job, columns_of_terminal()));
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(flags.interval_s);
    while (std::chrono::steady_clock::now() < until) {
      if (signals.signal() != 0) return kDone;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    std::vector<ProcessNow> all = processes_now(kPatience);
    std::erase_if(all, [&name](const ProcessNow& process) { return process.job != name; });
    if (all.empty()) {
      print_result("the job has ended\n");
      return kDone;
    }
    job = std::move(all);
  }
}

}  // namespace

Action add_top(CLI::App& app) {
  const auto flags = std::make_shared<TopFlags>();
  app.add_option("RUN", flags->run, "which job (default: the only one)")->type_name("");
  app.add_flag("--once", flags->once, "print the table once; as where stdout is no terminal");
  add_real(app, "--interval", flags->interval_s, "seconds between two tables (default: 1)", {.least = 0.1});
  app.footer(kTopFooter);
  return [flags](const Invocation&) { return run_top(*flags); };
}

}  // namespace trireme::cli
