// Flags of other launchers, and what to write here in their place.
#pragma once

#include <optional>
#include <string>

namespace trireme::cli {

/// The advice for `flag` of torchrun, `deepspeed`, `accelerate launch` or mpirun, with its dashes and in either
/// spelling
/// (--nproc_per_node, --nproc-per-node); nothing where it is none of theirs.
std::optional<std::string> advice_for_flag(const std::string& flag);

}  // namespace trireme::cli
