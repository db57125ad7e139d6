// The random number generator that this rank's operators draw from, as text.
#pragma once

#include <string>

namespace trireme {

std::string generator_state();
/// Throws    CheckpointError: `text` was not written by generator_state().
void set_generator_state(const std::string& text);

}  // namespace trireme
