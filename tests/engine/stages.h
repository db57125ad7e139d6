// Every way of sharding that an engine's behaviour must not depend on.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/zero_stages.h"

#include "trireme/config/config.h"

namespace trireme::testing {

/// A way of sharding, and the dtype of the weights.
struct Stage {
  std::string name;
  int stage;
  GatherPolicy gather;
  at::ScalarType dtype;
};

/// Both dtypes at stage 3, one of them at the others.
inline std::vector<Stage> all_stages() {
  std::vector<Stage> stages;
  for (const auto& [name, policy] : kZeroStages)
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
      if (policy.stage == 3 || (policy.stage == 1) == (dtype == at::kBFloat16))
        stages.push_back({name + (dtype == at::kFloat ? "Fp32" : "Bf16"), policy.stage, policy.gather, dtype});
  return stages;
}

/// `config` sharded as `stage` says, in small units that are released and gathered many times.
inline Config with_stage(Config config, const Stage& stage) {
  config.precision.weight_dtype = stage.dtype;
  config.precision.buffer_dtype = stage.dtype;  // libtorch's BatchNorm wants its averages in it
  config.pager.stage = stage.stage;
  config.pager.gather = stage.gather;
  config.pager.live_bytes = 1;
  config.pager.poison = true;
  config.pager.units.merge_below_bytes = 0;
  return config;
}

inline std::string name_of_stage(const ::testing::TestParamInfo<Stage>& info) { return info.param.name; }

}  // namespace trireme::testing
