// The random number generator that this rank's operators draw from, as text.
#pragma once

#include <cstdint>
#include <string>

namespace trireme {

std::string generator_state();
/// What it was last seeded with.
uint64_t generator_seed();
/// Throws    CheckpointError: `text` was not written by generator_state().
void set_generator_state(const std::string& text);

}  // namespace trireme
