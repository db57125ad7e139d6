// `trireme inspect`: what is in a checkpoint, and whether it is whole.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/checkpoint_place.h"
#include "cli/command.h"
#include "cli/flags.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/checkpoint/inspect.h"

namespace trireme::cli {
namespace {

constexpr const char* kInspectFooter =
    "DIR is the folder of a run, of its checkpoints, or of one checkpoint; or a .safetensors file. Every checksum is\n"
    "compared, and each damaged, truncated or missing place is listed: then the exit code is 1.\n\n"
    "Examples:\n"
    "  trireme inspect runs/llama-3m\n"
    "  trireme inspect runs/llama-3m/checkpoints --tag global_step100 --json";

struct InspectFlags {
  std::string folder;
  std::string tag;
  bool json = false;
  bool tensors = false;
  bool no_verify = false;
};

int run_inspect(const InspectFlags& flags) {
  const auto report = inspect_checkpoint(checkpoints_folder(flags.folder), flags.tag, {.verify = !flags.no_verify});
  const auto list = flags.tensors ? ListTensors::kAll : ListTensors::kLargest;
  // Names of files may be any bytes, and JSON is UTF-8.
  const auto json_text = [&] {
    return to_json(report, list).dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  };
  print_result(flags.json ? json_text() : to_text(report, list));
  return report.healthy() ? kDone : kFailed;
}

}  // namespace

Action add_inspect(CLI::App& app) {
  const auto flags = std::make_shared<InspectFlags>();
  app.add_option("DIR", flags->folder, "what to look at")->type_name("")->required();
  app.add_option("--tag", flags->tag, "which checkpoint of the folder (default: the one that `latest` names)")
      ->type_name("TAG");
  app.add_flag("--tensors", flags->tensors, "list every tensor, not only the largest");
  app.add_flag("--no-verify", flags->no_verify, "do not read the data: look at the manifest and at the files' sizes");
  app.add_flag("--json", flags->json, "for programs");
  app.footer(kInspectFooter);
  return [flags](const Invocation&) { return run_inspect(*flags); };
}

}  // namespace trireme::cli
