// `trireme completion`: what a shell offers behind `trireme`, from the commands' own declarations.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/flags.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"
#include "trireme/base/words.h"

namespace trireme::cli {
namespace {

constexpr const char* kCompletionFooter =
    "Examples:\n"
    "  eval \"$(trireme completion bash)\"      in ~/.bashrc\n"
    "  eval \"$(trireme completion zsh)\"       in ~/.zshrc, behind compinit";

// The function is the same in both shells: zsh's bashcompinit gives it bash's names and arrays.
constexpr const char* kZshHead = "autoload -U +X bashcompinit && bashcompinit\n";

constexpr const char* kWalk = R"(_trireme() {
  local at="" flags="" values="" commands="" choices="" program="" index word flag
  COMPREPLY=()
  for ((index = 1; index < COMP_CWORD; index++)); do
    word="${COMP_WORDS[index]}"
    [[ -z "$at" && "$word" == help ]] && continue
    case "$at/$word" in
)";

constexpr const char* kDescribe = R"(    esac
  done
  case "$at" in
)";

// A flag and its value may be one word, which bash cuts at the equals sign.
constexpr const char* kOffer = R"(  esac
  word="${COMP_WORDS[COMP_CWORD]}"
  flag="${COMP_WORDS[COMP_CWORD-1]}"
  if [[ "$word" == "=" ]]; then
    word=""
  elif [[ "$flag" == "=" ]]; then
    flag="${COMP_WORDS[COMP_CWORD-2]}"
  fi
  if [[ -n "$program" ]]; then
    for ((index = 2; index < COMP_CWORD; index++)); do
      case "${COMP_WORDS[index]}" in
        "=") ((index++)) ;;
        -*) [[ " $values " == *" ${COMP_WORDS[index]} "* && "${COMP_WORDS[index+1]}" != "=" ]] && ((index++)) ;;
        *) return ;;
      esac
    done
  fi
  if [[ " $values " == *" $flag "* ]]; then
    [[ "$choices" == *"|$flag "* ]] || return
    choices="${choices#*"|$flag "}"
    COMPREPLY=($(compgen -W "${choices%%"|"*}" -- "$word"))
  elif [[ "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  else
    COMPREPLY=($(compgen -W "$commands" -- "$word"))
  fi
}
complete -o default -F _trireme trireme
)";

// A command as the script knows it: "config check".
struct Described {
  std::string path;
  std::vector<std::string> flags;   // long ones
  std::vector<std::string> values;  // those, and short ones, behind which a value stands
  std::vector<std::string> commands;
  std::string choices;  // "|--dtype fp32 bf16|--mode mixed low"
  bool takes_program = false;
};

void describe(CLI::App& app, const std::string& path, bool takes_program, std::vector<Described>& all) {
  Described one{.path = path, .flags = {}, .values = {}, .commands = {}, .choices = "", .takes_program = takes_program};
  for (CLI::Option* option : app.get_options()) {
    std::vector<std::string> names;
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
    one.flags.insert(one.flags.end(), names.begin(), names.end());
    for (const auto& name : option->get_snames()) names.push_back("-" + name);
    if (option->get_items_expected_max() == 0) continue;
    one.values.insert(one.values.end(), names.begin(), names.end());
    const std::string choices = choices_of(*option);
    // The values of an argument without a flag: offered where a command would be.
    if (names.empty() && !choices.empty()) one.commands.push_back(choices);
    for (const auto& name : names)
      if (!choices.empty()) one.choices += str("|", name, " ", choices);
  }
  for (CLI::App* below : app.get_subcommands({})) one.commands.push_back(below->get_name());
  all.push_back(one);
  for (CLI::App* below : app.get_subcommands({})) describe(*below, path + " " + below->get_name(), takes_program, all);
}

std::vector<Described> described_commands() {
  std::vector<Described> all;
  Described program{.path = "",
                    .flags = {"--help", "--version"},
                    .values = {},
                    .commands = {"help"},
                    .choices = "",
                    .takes_program = false};
  for (const Command& command : commands()) program.commands.emplace_back(command.name);
  all.push_back(program);
  for (const Command& command : commands()) {
    CLI::App app;
    CLI::App& declared = *app.add_subcommand(command.name, command.summary);
    command.add(declared);
    describe(declared, command.name, command.takes_program, all);
  }
  return all;
}

std::string script() {
  const auto all = described_commands();
  std::string text = kWalk;
  for (const Described& one : all) {
    const auto cut = one.path.rfind(' ');
    const std::string above = cut == std::string::npos ? "" : one.path.substr(0, cut);
    const std::string name = cut == std::string::npos ? one.path : one.path.substr(cut + 1);
    if (!one.path.empty()) text += str("      \"", above, "/", name, "\") at=\"", one.path, "\" ;;\n");
  }
  text += kDescribe;
  for (const Described& one : all)
    text += str("    \"", one.path, "\")\n      flags=\"", joined(one.flags, " "), "\"\n      values=\"",
                joined(one.values, " "), "\"\n      commands=\"", joined(one.commands, " "), "\"\n      choices=\"",
                one.choices, "|\"\n", one.takes_program ? "      program=yes\n" : "", "      ;;\n");
  return text + kOffer;
}

}  // namespace

Action add_completion(CLI::App& app) {
  const auto shell = std::make_shared<std::string>();
  app.add_option("SHELL", *shell, "bash or zsh")->required()->check(one_of({"bash", "zsh"}))->type_name("");
  app.footer(kCompletionFooter);
  return [shell](const Invocation&) {
    print_result((*shell == "zsh" ? kZshHead : "") + script());
    return kDone;
  };
}

}  // namespace trireme::cli
