#include "cli/command.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <optional>

#include "cli/explain.h"
#include "cli/launch/foreign_flags.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/launcher_channel.h"
#include "trireme/base/suggest.h"
#include "trireme/base/version.h"
#include "trireme/base/words.h"

namespace trireme::cli {
namespace {

constexpr const char* kDescription = "Trireme trains models that do not fit on one device.";

constexpr const char* kFooter =
    "Examples:\n"
    "  trireme train --model llama-3m --data my_corpus/ --ranks 2 --steps 500\n"
    "  trireme generate runs/llama-3m --prompt \"def main(\"\n"
    "  trireme launch --num_gpus 4 ./my_program --epochs 3\n"
    "  trireme estimate --params 7B --world 64\n\n"
    "Each command has its own --help; trireme help COMMAND shows it, too.";

constexpr const char* kExitCodes =
    "Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 another rank failed, 130 interrupted (128 + "
    "signal).";

int exit_code_of(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kConfig:
    case ErrorCode::kBatchSize:
    case ErrorCode::kUnsupported:
    case ErrorCode::kData:
      return kWrongUse;
    case ErrorCode::kPeerLost:
    case ErrorCode::kTimeout:
    case ErrorCode::kDiverged:
      return kPeerFailed;
    default:
      return kFailed;
  }
}

int report(const std::string& name, const std::string& message, int exit_code) {
  // One write, so that the lines of several ranks do not mix.
  const std::string line = name + ": " + message + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  return exit_code;
}

int run_action(const std::string& name, const Action& action, const Invocation& invocation) {
  try {
    return action(invocation);
  } catch (const Error& error) {
    const int exit_code = exit_code_of(error);
    const std::string kind = exit_code == kPeerFailed ? str(trireme::name_of(error.code()), ": ") : "";
    // The launcher shows one of the same errors of several ranks.
    if (exit_code != kPeerFailed && leave_to_launcher(error.what())) return exit_code;
    return report(name, kind + error.what(), exit_code);
  } catch (const std::exception& error) {
    return report(name, explain(error, name), kFailed);
  }
}

// Text that a flag of the program itself asks for, such as --help.
int print_text(const std::string& text) {
  try {
    print_result(text);
    return kDone;
  } catch (const Error& error) {
    return report("trireme", error.what(), exit_code_of(error));
  }
}

// Where the program begins in `launch --num_gpus 2 ./program --flag`: behind the flags and their values.
size_t program_position(const CLI::App& app, const std::vector<std::string>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& word = arguments[i];
    if (word == "--" || !word.starts_with("-")) return i;
    const auto options = app.get_options([&](const CLI::Option* option) { return option->check_name(word); });
    if (!options.empty() && options[0]->get_items_expected_max() > 0) ++i;
  }
  return arguments.size();
}

// Without their dashes, which would make any two alike.
std::vector<std::string> flag_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back(name);
  }
  return names;
}

// The innermost command that was called: `config check` rather than `config`.
CLI::App& innermost(CLI::App& app) {
  const auto called = app.get_subcommands();
  return called.empty() ? app : innermost(*called.front());
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

// A flag where a command is expected is called a flag.
std::string no_command(const std::string& word, std::vector<std::string> commands) {
  const bool is_flag = word.starts_with("-");
  std::vector<std::string> flags = {"help", "version"};  // of the program itself
  const std::string name = word.substr(std::min(word.find_first_not_of('-'), word.size()));
  const std::string flag = closest_name(name, flags);
  if (is_flag && !flag.empty()) return str("there is no flag ", word, ". Did you mean `--", flag, "`?");
  if (is_flag) return str("there is no flag ", word, "; give a command first: ", joined(commands));
  const auto hint = did_you_mean(word, commands);
  if (!hint.empty()) return str("there is no command '", word, "'.", hint);
  return str("there is no command '", word, "'; there is: ", joined(commands));
}

// `takes_program`: the command is a launcher, so that flags of others are known.
std::optional<std::string> unexpected_argument(const CLI::App& app, bool takes_program) {
  const auto extras = app.remaining(true);
  if (extras.empty()) return std::nullopt;
  const auto& word = extras.front();
  const std::string name = word.substr(0, word.find('='));
  if (!word.starts_with("-")) {
    const auto commands = command_names(app);
    if (commands.empty()) return str("unexpected argument '", word, "'");
    return no_command(word, commands);
  }
  if (const auto advice = takes_program ? advice_for_flag(name) : std::nullopt)
    return str("there is no flag ", name, "; ", *advice);
  const auto meant = closest_name(name.substr(std::min(name.find_first_not_of('-'), name.size())), flag_names(app));
  return str("there is no flag ", name, meant.empty() ? "" : str(". Did you mean `--", meant, "`?"));
}

std::string name_of(const CLI::App& app) {
  return app.get_parent() ? name_of(*app.get_parent()) + " " + app.get_name() : app.get_name();
}

// CLI11's texts where ours say more: the rest of them open with the flag and our validators' words.
std::string complaint(const CLI::App& app, const CLI::ParseError& error) {
  const std::string text = error.what();
  const std::string flag = text.substr(0, text.find_first_of(": "));
  const auto* option = app.get_option_no_throw(flag);
  if (error.get_name() == "RequiredError" && !option) return str("give a command: ", joined(command_names(app)));
  if (error.get_name() == "ArgumentMismatch" && option)
    return str("a value is missing: ", flag, " ", option->get_type_name());
  if (error.get_name() == "ExcludesError" && option)
    return str(flag, " and ", text.substr(text.rfind(' ') + 1), " exclude each other; give one");
  if (error.get_name() == "RequiredError")
    return str(option->get_name(option->get_positional()), " is missing: ", option->get_description());
  return text;
}

class HelpFormatter : public CLI::Formatter {
 public:
  explicit HelpFormatter(std::string words) : words_(std::move(words)) { column_width(34); }
  std::string make_usage(const CLI::App* app, std::string) const override {
    const auto positional = app->get_options([](const CLI::Option* option) { return option->get_positional(); });
    const std::string commands = app->get_subcommands({}).empty() ? "" : " COMMAND";
    std::string words = words_;
    for (const auto* option : positional) words += " " + option->get_name(/*positional=*/true);
    return "Usage: " + name_of(*app) + commands + " [FLAGS]" + words + "\n";
  }
  std::string make_footer(const CLI::App* app) const override {
    return CLI::Formatter::make_footer(app) + "\n" + kExitCodes + "\n";
  }

 private:
  std::string words_;
};

int run_command(const Command& command, const std::vector<std::string>& arguments) {
  CLI::App app(kDescription, "trireme");
  // A repeated flag counts as its last mention says, so that a script's own can be replaced by those behind it.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.formatter(std::make_shared<HelpFormatter>(command.takes_program ? " PROGRAM [ARGUMENTS...]" : ""));
  auto& chosen = *app.add_subcommand(command.name, command.summary);
  chosen.allow_extras();
  const auto action = command.add(chosen);
  Invocation invocation{arguments, {}};
  auto flags = arguments;
  if (command.takes_program) {
    const auto position = program_position(chosen, arguments);
    flags.resize(position);
    invocation.program.assign(arguments.begin() + static_cast<std::ptrdiff_t>(position), arguments.end());
    if (!invocation.program.empty() && invocation.program.front() == "--")
      invocation.program.erase(invocation.program.begin());
  }
  flags.insert(flags.begin(), command.name);
  std::reverse(flags.begin(), flags.end());  // CLI11 takes them from the back
  try {
    app.parse(flags);
  } catch (const CLI::CallForHelp&) {
    return print_text(innermost(app).help());
  } catch (const CLI::ParseError& error) {
    const auto unexpected =
        unexpected_argument(innermost(app), command.takes_program);  // a misspelt flag is why a required one is missing
    const auto name = name_of(innermost(app));
    return report(name, str(unexpected.value_or(complaint(innermost(app), error)), " (see ", name, " --help)"),
                  kWrongUse);
  }
  const auto name = name_of(innermost(app));
  if (const auto unexpected = unexpected_argument(innermost(app), command.takes_program)) {
    return report(name, str(*unexpected, " (see ", name, " --help)"), kWrongUse);
  }
  return run_action(name, action, invocation);
}

std::string help_text() {
  std::string text = str(kDescription, "\nUsage: trireme COMMAND [FLAGS]\n\nCommands:\n");
  for (const auto& command : commands()) text += formatted("  {:<13}{}\n", command.name, command.summary);
  return str(text, "\nFlags:\n  -h,--help   this text\n  --version   the version\n\n", kFooter, "\n", kExitCodes, "\n");
}

}  // namespace

const std::vector<Command>& commands() {
  static const std::vector<Command> all = {
      {"train", "Trains a language model on your text.", add_train},
      {"generate", "Writes text with a trained model.", add_generate},
      {"launch", "Starts a program as several ranks on this machine.", add_launch, true},
      {"deepspeed", "Starts a program as DeepSpeed's launcher does.", add_deepspeed, true},
      {"inspect", "Says what is in a checkpoint and whether it is whole.", add_inspect},
      {"consolidate", "Writes a checkpoint's weights as safetensors.", add_consolidate},
      {"convert", "Writes a checkpoint in another layout, such as DeepSpeed's.", add_convert},
      {"estimate", "Says how much memory the model states need.", add_estimate},
      {"plan", "Shows what each axis does with a model, or a pipeline's schedule.", add_plan},
      {"config", "Checks a configuration file, or converts it.", add_config},
      {"top", "Shows what the ranks of a running job do.", add_top},
      {"timeline", "Joins the timelines of a run's ranks, for Perfetto.", add_timeline},
      {"env", "Says what this machine and installation have.", add_env},
      {"docs", "Prints the manual.", add_docs},
      {"completion", "Prints what completes these words in bash or zsh.", add_completion},
  };
  return all;
}

int run(const std::vector<std::string>& arguments) {
  if (arguments.size() > 1 && arguments[0] == "help") {
    std::vector<std::string> asked(arguments.begin() + 1, arguments.end());
    asked.emplace_back("--help");
    return run(asked);
  }
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h" || arguments[0] == "help") {
    const int printed = print_text(help_text());
    return arguments.empty() ? kWrongUse : printed;
  }
  if (arguments[0] == "--version") {
    return print_text(str("trireme ", kVersion, "\n"));
  }
  std::vector<std::string> names;
  for (const auto& command : commands()) {
    if (arguments[0] == command.name) return run_command(command, {arguments.begin() + 1, arguments.end()});
    names.emplace_back(command.name);
  }
  return report("trireme", str(no_command(arguments[0], names), " (see trireme --help)"), kWrongUse);
}

}  // namespace trireme::cli
