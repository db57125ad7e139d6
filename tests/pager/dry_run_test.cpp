// A pager over ranks that are not there: what a job of that size would call, counted on one machine.
#include <gtest/gtest.h>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/comm/fake.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

TEST(ADryRun, CountsTheGathersOfStage3) {
  const auto world = make_fake_group(5, 64);
  Chain net(4);
  Pager pager(*world, named_parameters_of(*net), {.stage = 3, .prefetch_bytes = 0, .units = {.merge_below_bytes = 0}});
  const int64_t shard_bytes = pager.layout().units.front().shard_numel * 4;
  for (int step = 0; step < 3; ++step) {
    const int64_t gathers = pager.counters().gathers;
    const CommCounters before = world->counters();
    loss_of(net).backward();
    pager.end_backward();
    sgd_step(pager, 0.1);
    EXPECT_EQ(pager.counters().gathers - gathers, 4);  // each unit once: there is room for all
    // Beside the gathers: the end of the window and of backward, the user's writes, and the norm.
    EXPECT_EQ(world->counters().calls - before.calls, 4 + 4);
    // This rank's shard of each unit goes to the 63 others.
    EXPECT_GE(world->counters().bytes_sent - before.bytes_sent, 4 * 63 * shard_bytes);
  }
  pager.restore();
}

}  // namespace
}  // namespace trireme
