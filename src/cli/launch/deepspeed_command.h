// The command `deepspeed`, for machines and environments without DeepSpeed.
#pragma once

#include <string>

namespace trireme::cli {

/// Makes an executable `deepspeed` beside the command `trireme` that was typed, which runs `trireme deepspeed`. Returns
/// a line that says what was done. One of its own is replaced.
///
/// Throws    ConfigError: a command `deepspeed` is there already, beside it or along PATH, by its path. IoError.
std::string install_deepspeed_command();

}  // namespace trireme::cli
