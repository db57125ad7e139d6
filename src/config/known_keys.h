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

/// Takes the keys of the JSON object `defaults` from `section` as such without a meaning; null: of any type.
/// Throws    as read_known_keys().
void read_without_meaning(Section& section, const char* defaults);

/// The same as read_known_keys() for the keys of `zero_optimization`.
void read_known_zero_keys(Section& zero);

}  // namespace trireme
