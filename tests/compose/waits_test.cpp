// A pipeline's step on devices leaves the host free.
#include <gtest/gtest.h>

#include <thread>

#include "tests/compose/scenario.h"

namespace trireme::compose {
namespace {

TEST(Waits, ATrainBatchWaitsForNoDevice) {
  FakeRecord record;
  Scenario scenario;
  scenario.is_on_device = true;
  scenario.schedule = "1f1b";
  scenario.data = 1;
  scenario.config.erase("gradient_clipping");  // no norm for which the host waits
  run_ranks(2, [&](Rank& rank) {
    Notes notes;
    auto engine = StagedTraining(scenario, rank.world(), rank.id(), notes);
    for (int step = 0; step < 3; ++step) {
      const MicroBatches batches = engine.batches_of(step);  // whose copies to the device are waited for
      const int64_t before = record.host_waits(std::this_thread::get_id());
      (void)engine.train(batches);
      EXPECT_EQ(record.host_waits(std::this_thread::get_id()), before) << "rank " << rank.id() << ", step " << step;
    }
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

}  // namespace
}  // namespace trireme::compose
