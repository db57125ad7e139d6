// Every way in which ZeRO shards a model: what a program learns must not depend on it.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "trireme/pager/pager.h"

namespace trireme::testing {

struct ZeroStage {
  std::string name;  ///< as a part of a test's name
  PagerPolicy policy;
  friend void PrintTo(const ZeroStage& stage, std::ostream* out) { *out << stage.name; }
};

/// Several units in a small model, and only the two largest of them may be live, so that every unit is released and
/// gathered many times; what is released is filled with NaN.
inline PagerPolicy harsh_policy(int stage, GatherPolicy gather = GatherPolicy::kAuto) {
  PagerPolicy policy{.stage = stage, .gather = gather, .live_bytes = 1, .poison = true};
  policy.units.merge_below_bytes = 0;
  return policy;
}

inline const std::vector<ZeroStage> kZeroStages = {{"Stage0", harsh_policy(0)},
                                                   {"Stage1", harsh_policy(1)},
                                                   {"Stage2", harsh_policy(2)},
                                                   {"Stage3Shared", harsh_policy(3, GatherPolicy::kShared)},
                                                   {"Stage3Copy", harsh_policy(3, GatherPolicy::kCopy)}};

inline std::string name_of_zero_stage(const ::testing::TestParamInfo<ZeroStage>& info) { return info.param.name; }

}  // namespace trireme::testing
