// `trireme config check`: what a configuration file means, or what is wrong with it.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/flags.h"
#include "cli/print.h"
#include "cli/train_setup.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/config/config.h"
#include "trireme/config/torch_scheduler.h"

namespace trireme::cli {
namespace {

constexpr const char* kConfigFooter =
    "Prints the configuration with every option spelled out, or says what is wrong with it (exit code 2).\n"
    "Example:\n"
    "  trireme config check ds_config.json --world 8";

struct CheckFlags {
  std::string file;
  int64_t world = 1;
};

}  // namespace

Action add_config(CLI::App& app) {
  const auto flags = std::make_shared<CheckFlags>();
  auto& check = *app.add_subcommand("check", "Prints the resolved configuration, or the error.");
  check.allow_extras();
  check.add_option("FILE", flags->file, "DeepSpeed JSON")->type_name("")->required();
  add_whole(check, "--world", flags->world, "number of ranks, which the batch sizes depend on", {.most = 1'000'000})
      ->capture_default_str();
  check.footer(kConfigFooter);
  app.require_subcommand(1);
  return [flags](const Invocation&) {
    // All that the reader has to say, hints included, is what was asked for.
    set_log_sink([](LogLevel, const std::string& message) { std::fprintf(stderr, "%s\n", message.c_str()); });
    Json json = read_input([&] { return read_hjson(flags->file); });
    const auto torch_scheduler = take_torch_scheduler(json);
    const auto filled = fill_in_autos(json, {});
    Json resolved = to_json(config_from_json(json, static_cast<int>(flags->world), {}, flags->file));
    for (const auto& one : filled) {
      std::fprintf(stderr,
                   "%s: `%s` is \"auto\": `trireme train` fills in %s (%s without it); for a program of your own "
                   "write a number\n",
                   flags->file.c_str(), one.key.c_str(), one.source.c_str(), one.value.c_str());
    }
    if (torch_scheduler) {
      std::fprintf(
          stderr,
          "%s: `scheduler.type` = %s is of torch.optim.lr_scheduler: initialize() in Python makes it and checks "
          "its params; `trireme train` and C++ refuse it\n",
          flags->file.c_str(), torch_scheduler->at("type").dump().c_str());
      resolved["scheduler"] = *torch_scheduler;
    }
    print_result(resolved.dump(2) + "\n\n");
    return kDone;
  };
}

}  // namespace trireme::cli
