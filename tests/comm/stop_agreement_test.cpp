// Ranks of which one gets a signal, as processes.
#include "trireme/comm/stop_agreement.h"

#include <gtest/gtest.h>

#include <csignal>
#include <string>

#include "tests/support/processes.h"

namespace trireme {
namespace {

// Steps until the end, and in the tens the step after which a save was asked for. Rank 1 gets its signals after its
// third and sixth step.
int train_until_stopped(Group& world, const std::string&) {
  int step = 0, saved = 0;
  while (!stop_requested(world)) {
    ++step;
    if (world.rank() == 1 && step == 3) std::raise(SIGUSR1);
    if (world.rank() == 1 && step == 6) std::raise(SIGTERM);
    if (take_save_request(world)) saved = 10 * saved + step;
    if (step == 9) break;
  }
  return 10 * saved + step;
}

TEST(StopAgreement, EndsAndSavesOnAllRanksAtOneStep) {
  for (const auto& result : run_processes(3, train_until_stopped)) EXPECT_EQ(result.exit_code, 36) << result.error_text;
}

}  // namespace
}  // namespace trireme
