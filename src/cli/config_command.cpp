// `trireme config`: what a configuration file means, what is wrong with it, and the same in another dialect.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flags.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "cli/train_setup.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/config/dialects.h"
#include "trireme/config/source.h"
#include "trireme/config/torch_scheduler.h"

namespace trireme::cli {
namespace {

constexpr const char* kConfigFooter =
    "Prints the configuration with every option spelled out, or every mistake in it with its line (exit code 2).\n"
    "Example:\n"
    "  trireme config check ds_config.json --world 8";
constexpr const char* kDialectFooter =
    "Settings that the other dialect has no word for are named on stderr, with what to do instead.\n"
    "Example:\n"
    "  trireme config convert --to deepspeed fsdp.yaml > ds_config.json";

struct ConfigFlags {
  std::string file;
  int64_t world = 1;
  std::string to;
};

void add_file(CLI::App& app, ConfigFlags& flags) {
  app.allow_extras();
  app.add_option("FILE", flags.file, "DeepSpeed JSON, or YAML of Accelerate")->type_name("")->required();
  add_whole(app, "--world", flags.world, "number of ranks, which the batch sizes depend on", {.most = 1'000'000})
      ->capture_default_str();
}

/// Everything that the reader has to say, hints included, is what was asked for.
void show_remarks() {
  set_log_sink([](LogLevel, const std::string& message) { std::fprintf(stderr, "%s\n", message.c_str()); });
}

/// Throws ConfigError: all mistakes, a line each.
void refuse_mistakes(const std::vector<ConfigMistake>& mistakes, const std::string& file) {
  if (mistakes.empty()) return;
  const std::string title = mistakes.size() == 1 ? "" : str(mistakes.size(), " mistakes:\n");
  throw ConfigError(title + text_of(mistakes, file), mistakes[0].code);
}

/// Runs `read`; a refusal that follows from the number of ranks says how to give another one.
template <class Read>
auto for_ranks(const ConfigFlags& flags, const Read& read) {
  try {
    return read();
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    if (text.find(" ranks") == std::string::npos && error.code() != ErrorCode::kBatchSize) throw;
    throw ConfigError(
        str(text, " (read for ", flags.world, flags.world == 1 ? " rank" : " ranks", "; --world gives another number)"),
        error.code());
  }
}

int check(const ConfigFlags& flags) {
  show_remarks();
  ConfigSource source = read_input([&] { return read_source(flags.file); });
  const auto torch_scheduler = take_torch_scheduler(source.options);
  const auto filled = fill_in_autos(source.options, {});
  for_ranks(flags, [&] { refuse_mistakes(mistakes_in(source, static_cast<int>(flags.world)), flags.file); });
  Json resolved = to_json(config_from_source(source, static_cast<int>(flags.world)));
  for (const auto& one : filled) {
    std::fprintf(stderr,
                 "%s: `%s` is \"auto\": `trireme train` fills in %s (%s without it); for a program of your own "
                 "write a number\n",
                 flags.file.c_str(), one.key.c_str(), one.source.c_str(), one.value.c_str());
  }
  if (torch_scheduler) {
    std::fprintf(stderr,
                 "%s: `scheduler.type` = %s is of torch.optim.lr_scheduler: initialize() in Python makes it and checks "
                 "its params; `trireme train` and C++ refuse it\n",
                 flags.file.c_str(), torch_scheduler->at("type").dump().c_str());
    resolved["scheduler"] = *torch_scheduler;
  }
  print_result(resolved.dump(2) + "\n\n");
  return kDone;
}

int convert_file(const ConfigFlags& flags) {
  show_remarks();
  const ConfigSource source = read_input([&] { return read_source(flags.file); });
  const Dialect to = flags.to == "fsdp" ? Dialect::kFsdp : Dialect::kDeepSpeed;
  const Conversion converted = for_ranks(flags, [&] { return convert(source, to, static_cast<int>(flags.world)); });
  for (const std::string& setting : converted.left_out)
    std::fprintf(stderr, "%s: not in the new file: %s\n", flags.file.c_str(), setting.c_str());
  print_result(converted.text);
  return kDone;
}

}  // namespace

Action add_config(CLI::App& app) {
  const auto flags = std::make_shared<ConfigFlags>();
  auto& check_app = *app.add_subcommand("check", "Prints the resolved configuration, or every mistake in it.");
  add_file(check_app, *flags);
  check_app.footer(kConfigFooter);
  auto& convert_app = *app.add_subcommand("convert", "Prints the configuration in another dialect.");
  add_file(convert_app, *flags);
  convert_app.add_option("--to", flags->to, "fsdp (YAML of Accelerate) or deepspeed (JSON)")
      ->type_name("")
      ->required()
      ->check(one_of({"fsdp", "deepspeed"}));
  convert_app.footer(kDialectFooter);
  auto& keys_app = *app.add_subcommand("keys", "Prints every key with its values, default and effect.");
  app.add_subcommand("map", "Prints which key of FSDP is which of DeepSpeed.");
  app.require_subcommand(1);
  return [flags, &check_app, &convert_app, &keys_app](const Invocation&) -> int {
    if (check_app.parsed()) return check(*flags);
    if (convert_app.parsed()) return convert_file(*flags);
    print_result(keys_app.parsed() ? keys_page() : dialect_map());
    return kDone;
  };
}

}  // namespace trireme::cli
