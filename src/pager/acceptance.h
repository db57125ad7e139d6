// What a pager takes over, and what it refuses before anything is changed.
#pragma once

#include "trireme/comm/group.h"
#include "trireme/pager/pager.h"

namespace trireme {

/// kAuto decided. Throws ConfigError: kShared on ranks that share no memory.
GatherPolicy choose_gather(const PagerPolicy& policy, const Group& group);

/// Throws ConfigError: a stage or accumulation dtype that is not there.
void check(const PagerPolicy& policy);
/// Throws ConfigError that names the parameter: off the host, of a dtype that cannot be trained, no leaf, managed already.
void check(const NamedParameter& parameter);

/// Gives `tensor` a storage that holds just it, from the first byte, in some dense order.
void normalise(const at::Tensor& tensor);

}  // namespace trireme
