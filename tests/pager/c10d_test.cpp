// Training over a group that shares no memory: every stage falls back to copies, and nothing asks for shared memory.
#include <gtest/gtest.h>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/base/error.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

Program<Loose> two_layers() {
  return {
      .make =
          [] {
            return Loose(std::vector<std::vector<int64_t>>{{6, 8}, {8, 5}});
          },
      .run =
          [](Loose& net, const Turn&) {
            at::randn({4, 8}).matmul((*net)[0].t()).narrow(1, 0, 5).matmul((*net)[1].t()).square().mean().backward();
          }};
}

TEST(TheChosenGather, WithoutSharedMemoryTrainsLikeOneProcessAtEveryStage) {
  for (int stage = 0; stage <= 3; ++stage)
    expect_trains_like_one_process(two_layers(), {.stage = stage, .gather = GatherPolicy::kAuto}, Agreement::kBits,
                                   {1, 2, 3}, RankBackend::kC10d);
}

TEST(TheSharedGather, IsRefusedWithoutSharedMemory) {
  const auto train = [](Rank& rank) {
    paged_weights(two_layers(), rank, {.stage = 3, .gather = GatherPolicy::kShared});
  };
  EXPECT_THROW(run_ranks(2, train, {.backend = RankBackend::kC10d}), ConfigError);
}

}  // namespace
}  // namespace trireme
