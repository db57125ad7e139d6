// The commands of `trireme`. Each is one file that declares its flags and returns what is to run.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace trireme::cli {

/// How the command was called.
struct Invocation {
  std::vector<std::string> arguments;  ///< everything behind the command's name
  std::vector<std::string> program;    ///< `launch` only: the program to start and its arguments
};

/// Runs the command with the flags that were parsed into it; returns the exit code. Throws what the library throws.
using Action = std::function<int(const Invocation&)>;

struct Command {
  const char* name;
  const char* summary;
  Action (*add)(CLI::App& app);  ///< declares the flags on `app`
  bool takes_program = false;    ///< the first word that is no flag begins another program's command line
};

Action add_train(CLI::App& app);
Action add_launch(CLI::App& app);
Action add_deepspeed(CLI::App& app);
Action add_generate(CLI::App& app);
Action add_inspect(CLI::App& app);
Action add_consolidate(CLI::App& app);
Action add_convert(CLI::App& app);
Action add_estimate(CLI::App& app);
Action add_plan(CLI::App& app);
Action add_config(CLI::App& app);
Action add_timeline(CLI::App& app);
Action add_top(CLI::App& app);
Action add_env(CLI::App& app);
Action add_docs(CLI::App& app);
Action add_completion(CLI::App& app);

/// All commands, in the order in which --help lists them.
const std::vector<Command>& commands();

/// `trireme ARGUMENTS`: parses, runs, reports. Prints results to stdout and errors to stderr, each in one write; never
/// throws.
int run(const std::vector<std::string>& arguments);

}  // namespace trireme::cli
