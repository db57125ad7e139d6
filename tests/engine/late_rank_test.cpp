// Errors of a rank whose peer does not come along: which of the engine's methods, which reduction, which parameter.
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "tests/engine/dot.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;
using namespace std::chrono_literals;

Config late_config(int stage, GatherPolicy gather = GatherPolicy::kAuto) {
  Config config = sgd_config(2);
  config.pager.stage = stage;
  config.pager.gather = gather;
  return config;
}

TEST(ARankThatSavesAlone, IsNamedWithTheMethod) {
  for (const int stage : {0, 2, 3}) {
    const TemporaryFolder folder;
    run_ranks(2,
              [&](Rank& rank) {
                Dot net;
                auto engine = initialize(rank.world(), net, {.config = late_config(stage)});
                const auto go_on = [&] {
                  // The first rank to wait is the first to give up, and tells the other: it has to be the one that
                  // saves.
                  if (rank.id() == 1) std::this_thread::sleep_for(50ms);
                  if (rank.id() == 0) engine.save_checkpoint(folder.path());
                  for (int step = 0; step < 3; ++step) {
                    engine.backward(engine(vec(1, 2)));
                    engine.step();
                  }
                };
                const std::string text = error_of<CommError>(go_on);
                EXPECT_SAYS(text, "in save_checkpoint") << " at stage " << stage << ", rank " << rank.id();
              },
              {.timeout = 1s});
    EXPECT_FALSE(std::filesystem::exists(folder.path() / "latest"));
  }
}

TEST(ARankThatEndsInTheMiddle, IsNamedWithTheMethodThatWaitedForIt) {
  run_ranks(2,
            [](Rank& rank) {
              Dot net;
              auto engine = initialize(rank.world(), net, {.config = late_config(3, GatherPolicy::kShared)});
              engine.backward(engine(vec(1, 2)));
              engine.step();
              if (rank.id() == 1) return;
              const std::string text = error_of<CommError>([&] {
                engine.backward(engine(vec(1, 2)));
                engine.step();
              });
              EXPECT_SAYS(text, "rank 1");
              EXPECT_SAYS(text, "in step");
            },
            {.timeout = 1s});
}

TEST(ARankThatStopsBeforeItsBackward, LeavesAnErrorWithTheReductionAndTheParameter) {
  std::atomic<bool> has_ended{false};
  run_ranks(2,
            [&](Rank& rank) {
              Dot net;
              auto engine = initialize(rank.world(), net, {.config = late_config(3, GatherPolicy::kShared)});
              engine.backward(engine(vec(1, 2)));
              engine.step();
              if (rank.id() == 1) {
                while (!has_ended) std::this_thread::sleep_for(1ms);
                return;
              }
              engine.backward(engine(vec(1, 2)));
              const std::string text = error_of<CommError>([&] { (void)engine.pager().close_window(); });
              has_ended = true;
              EXPECT_SAYS(text, "reduction of gradients #2 (open from 'w' of unit '");
            },
            {.timeout = 1s});
}

}  // namespace
}  // namespace trireme
