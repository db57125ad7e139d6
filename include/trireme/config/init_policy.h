// The options of zero::Init that follow from a configuration.
#pragma once

#include "trireme/config/config.h"
#include "trireme/pager/init/init.h"

namespace trireme {

/// Enabled at ZeRO stage 3 alone; makes parameters in the dtype of the weights:
///   trireme::zero::Init scope(*world.group, trireme::init_policy(config));
zero::InitPolicy init_policy(const Config& config);

}  // namespace trireme
