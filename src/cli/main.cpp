// The `trireme` program.
#include <csignal>

#include "cli/command.h"

int main(int argc, char** argv) {
  // A log that nobody reads any more must not end a training run: writing then fails, and is not tried again.
  std::signal(SIGPIPE, SIG_IGN);
  // A write beyond `ulimit -f` fails with an error that says what to do, a log's too.
  std::signal(SIGXFSZ, SIG_IGN);
  return trireme::cli::run({argv + 1, argv + argc});
}
