// Every way of sharding that an engine's behaviour must not depend on.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "trireme/config/config.h"

namespace trireme::testing {

/// Small units that are released and gathered many times.
inline std::vector<PagerPolicy> all_policies() {
  std::vector<PagerPolicy> policies;
  for (int stage = 0; stage < 3; ++stage) policies.push_back({.stage = stage});
  policies.push_back({.stage = 3, .gather = GatherPolicy::kShared});
  policies.push_back({.stage = 3, .gather = GatherPolicy::kCopy, .live_bytes = 1, .poison = true});
  for (PagerPolicy& policy : policies) policy.units.merge_below_bytes = 0;
  return policies;
}

struct Stage {
  const char* name;
  int stage;
  GatherPolicy gather;
  at::ScalarType dtype;
};

inline std::vector<Stage> all_stages() {
  return {{"Stage0Fp32", 0, GatherPolicy::kAuto, at::kFloat},
          {"Stage1Bf16", 1, GatherPolicy::kAuto, at::kBFloat16},
          {"Stage2Fp32", 2, GatherPolicy::kAuto, at::kFloat},
          {"Stage3SharedFp32", 3, GatherPolicy::kShared, at::kFloat},
          {"Stage3SharedBf16", 3, GatherPolicy::kShared, at::kBFloat16},
          {"Stage3CopyFp32", 3, GatherPolicy::kCopy, at::kFloat},
          {"Stage3CopyBf16", 3, GatherPolicy::kCopy, at::kBFloat16}};
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
