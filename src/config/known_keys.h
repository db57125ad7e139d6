// DeepSpeed's keys that Trireme knows but does not act on: those without a meaning here, and those that are not there
// yet.
#pragma once

#include "config/section.h"

namespace trireme {

/// Takes the known top-level keys and sections of DeepSpeed from `top`.
///
/// Throws    ConfigError: kUnsupported for one that is switched on, but not there yet; kConfig for an unknown key inside, or a
///           value of the wrong type.
void read_known_keys(Section& top);

/// The same for the keys of `zero_optimization`.
void read_known_zero_keys(Section& zero);

}  // namespace trireme
