// Which device a rank has, in a form that ranks can compare.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme::comm {

/// The host's boot and the device's UUID: equal for two ranks of one device only.
std::string identity_of(c10::Device device);

/// The identity_of() of every rank, by rank. Collective.
std::vector<std::string> identities_of_all(Group& host, c10::Device device);

/// Two ranks whose devices are one.
std::optional<std::pair<int, int>> ranks_on_one_device(const std::vector<std::string>& identities);

}  // namespace trireme::comm
