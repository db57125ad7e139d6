// `trireme timeline`: one trace of all ranks.
#include "trireme/observe/timeline.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <filesystem>
#include <memory>

#include "cli/command.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

constexpr const char* kTimelineFooter =
    "DIR is `trireme.timeline.output_path` of the run's configuration: a folder with rank-0.json, rank-1.json and so\n"
    "on. Open the result in https://ui.perfetto.dev or chrome://tracing.\n\n"
    "Example:\n"
    "  trireme timeline timeline --output run.json";

struct TimelineFlags {
  std::string folder;
  std::string output;
};

int run_timeline(const TimelineFlags& flags) {
  const std::filesystem::path folder = std::filesystem::absolute(flags.folder).lexically_normal();
  const std::filesystem::path named = folder.has_filename() ? folder : folder.parent_path();
  const std::string output = flags.output.empty() ? named.string() + ".json" : flags.output;
  const auto ranks = join_timelines(flags.folder, output);
  print_result(str(output, " has ", ranks.size(), ranks.size() == 1 ? " rank" : " ranks",
                   "; open it in https://ui.perfetto.dev\n"));
  return kDone;
}

}  // namespace

Action add_timeline(CLI::App& app) {
  const auto flags = std::make_shared<TimelineFlags>();
  app.add_option("DIR", flags->folder, "the folder with a file of each rank")->type_name("")->required();
  app.add_option("--output,-o", flags->output, "the trace to write (default: DIR.json)")->type_name("FILE");
  app.footer(kTimelineFooter);
  return [flags](const Invocation&) {
    TimelineFlags given = *flags;
    while (given.folder.size() > 1 && given.folder.ends_with('/')) given.folder.pop_back();
    return run_timeline(given);
  };
}

}  // namespace trireme::cli
