// The `trireme` program.
#include "cli/command.h"

int main(int argc, char** argv) { return trireme::cli::run({argv + 1, argv + argc}); }
