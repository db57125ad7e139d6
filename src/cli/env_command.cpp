// `trireme env`: what an installation and its machine have, for a report of a mistake or a first look.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/machine_facts.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"

namespace trireme::cli {

Action add_env(CLI::App& app) {
  const auto json = std::make_shared<bool>(false);
  app.add_flag("--json", *json, "for programs; bytes");
  app.footer(
      "Versions, GPUs, memory, limits, and the variables of `trireme docs environment` that are set, without the value "
      "of\n"
      "TRIREME_TOKEN, which is a secret. Lines that begin with `warning:` tell what will hinder training.");
  return [json](const Invocation&) {
    const MachineFacts facts = machine_facts();
    print_result(*json ? json_of(facts).dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : text_of(facts));
    return kDone;
  };
}

}  // namespace trireme::cli
