// A hook of the library's host runs during waits, and an error of the hook ends them.
#include "trireme/base/wait_hook.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/support/error_of.h"
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
  run_ranks(2, [&](Rank& rank) {
    while (rank.id() == 1 && hook_->polls < 3) std::this_thread::sleep_for(1ms);
    rank.world().barrier();
  });
  EXPECT_GE(hook_->polls, 3);
  EXPECT_GE(hook_->begun, 1);
  EXPECT_EQ(hook_->begun, hook_->ended);
}

class InterruptedWaits : public WaitHooks, public ::testing::WithParamInterface<RankBackend> {};

TEST_P(InterruptedWaits, EndTheGroupOnEveryRank) {
  std::atomic<int> interrupted{0};
  const auto body = [&](Rank& rank) {
    if (rank.id() == 0) {
      hook_->interrupts = true;
      EXPECT_THROW(rank.world().all_reduce(at::zeros({4})).wait(), std::runtime_error);
      hook_->interrupts = false;
      EXPECT_NE(testing::error_of<CommError>([&] { rank.world().barrier(); }).find("Ctrl-C"), std::string::npos);
      ++interrupted;
      return;
    }
    while (interrupted == 0) std::this_thread::sleep_for(1ms);
    if (GetParam() == RankBackend::kC10d) {
      // An earlier message comes first: that rank 0 is in another call.
      EXPECT_THROW(rank.world().barrier(), CommError);
      return;
    }
    const std::string told = testing::error_of<CommError>([&] {
      rank.world().all_reduce(at::zeros({4})).wait();  // rank 0 may have posted its part
      rank.world().barrier();
    });
    EXPECT_NE(told.find("Ctrl-C"), std::string::npos) << told;
  };
  run_ranks(2, body, {.backend = GetParam()});
}

INSTANTIATE_TEST_SUITE_P(Backends, InterruptedWaits, ::testing::Values(RankBackend::kThreads, RankBackend::kC10d),
                         [](const auto& info) {
                           return std::string(info.param == RankBackend::kC10d ? "C10d" : "Threads");
                         });

}  // namespace
}  // namespace trireme
