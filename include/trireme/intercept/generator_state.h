// The random number generator that this rank's operators draw from, as text.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace trireme {

std::string generator_state();
/// What it was last seeded with.
uint64_t generator_seed();
/// Throws    CheckpointError: `text` was not written by generator_state().
void set_generator_state(const std::string& text);

/// The same for libtorch's default generator of `device`; empty on the host, which has the ones above.
std::string device_generator_state(c10::Device device);
/// Throws    as set_generator_state(). An empty state leaves the generator alone.
void set_device_generator_state(c10::Device device, const std::string& state);
/// Nothing on the host.
void manual_seed_device(c10::Device device, uint64_t seed);

}  // namespace trireme
