// The parameters that a pager takes over, and those that it refuses before anything is changed.
#pragma once

#include <vector>

#include "pager/weights/managed_parameter.h"
#include "trireme/comm/group.h"
#include "trireme/pager/pager.h"

namespace trireme {

/// Where all parameters are. Throws ConfigError that names two: they are on different devices.
c10::Device device_of(const std::vector<NamedParameter>& parameters);

/// kAuto decided. Throws ConfigError: kShared on ranks that share no memory, or for parameters that are not on the
/// host.
GatherPolicy choose_gather(const PagerPolicy& policy, const Group& group, c10::Device device);
/// The same for all meshes of a pager, and a mesh that the policy cannot serve is refused (kUnsupported).
GatherPolicy choose_gather(const PagerPolicy& policy, const std::vector<ShardMesh>& meshes, c10::Device device);

/// Throws ConfigError: a stage or accumulation dtype that is not there.
void check(const PagerPolicy& policy);
/// Throws ConfigError that names the parameter: without values, no leaf, managed already.
void check_place(const NamedParameter& parameter);
/// check_place(), and throws ConfigError for a dtype that cannot be trained.
void check(const NamedParameter& parameter);

/// Throws    as check().
ParameterSpec spec_of(const NamedParameter& parameter);

/// Gives each parameter a storage that holds just it, from the first byte, in some dense order, and that nobody
/// resizes.
/// Throws    ConfigError: two of them are over the same memory.
std::vector<ManagedParameter> take_over(std::vector<NamedParameter> parameters, const Layout& layout);

}  // namespace trireme
