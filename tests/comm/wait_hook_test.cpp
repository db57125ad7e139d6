// What the host of the library wants done during waits is done, and what it throws ends them.
#include "trireme/base/wait_hook.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using namespace std::chrono_literals;

struct CountingHook final : WaitHook {
  std::shared_ptr<void> begin() override {
    ++begun;
    return {nullptr, [this](void*) { ++ended; }};
  }
  void poll() override {
    ++polls;
    if (interrupts) throw std::runtime_error("Ctrl-C");
  }
  std::atomic<int> begun{0}, ended{0}, polls{0};
  std::atomic<bool> interrupts{false};
};

class WaitHooks : public ::testing::Test {
 protected:
  WaitHooks() { set_wait_hook(hook_); }
  ~WaitHooks() override { set_wait_hook(nullptr); }
  const std::shared_ptr<CountingHook> hook_ = std::make_shared<CountingHook>();
};

TEST_F(WaitHooks, AreToldOfAWaitThatIsLongAndOfItsEnd) {
  run_ranks(2, [](Rank& rank) {
    if (rank.id() == 1) std::this_thread::sleep_for(200ms);
    rank.world().barrier();
  });
  EXPECT_GE(hook_->polls, 3);
  EXPECT_GE(hook_->begun, 1);
  EXPECT_EQ(hook_->begun, hook_->ended);
}

TEST_F(WaitHooks, EndTheWaitAndTheGroupByWhatTheyThrow) {
  std::atomic<int> interrupted{0};
  run_ranks(2, [&](Rank& rank) {
    if (rank.id() == 0) {
      hook_->interrupts = true;
      EXPECT_THROW(rank.world().all_reduce(at::zeros({4})).wait(), std::runtime_error);
      hook_->interrupts = false;
      ++interrupted;
      return;
    }
    while (interrupted == 0) std::this_thread::sleep_for(1ms);
    try {
      rank.world().all_reduce(at::zeros({4})).wait();  // rank 0 may have posted its part
      rank.world().barrier();
      ADD_FAILURE() << "rank 1 did not hear of it";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("Ctrl-C"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace trireme
