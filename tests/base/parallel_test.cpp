// Loops over several threads: that they are several, and what they cover.
#include "trireme/base/parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace trireme {
namespace {

using namespace std::chrono_literals;

/// This thread's loops run on `count` threads for as long as it lives.
class ThreadCount {
 public:
  explicit ThreadCount(int count) : former_(at::get_num_threads()) { at::set_num_threads(count); }
  ~ThreadCount() { at::set_num_threads(former_); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  const int former_;
};

TEST(ParallelFor, RunsItsRangesAtOnce) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "one range after the other: the thread sanitizer does not know OpenMP's barriers";
#endif
  const ThreadCount three(3);
  std::atomic<int> begun{0};
  bool met = true;
  const auto end = std::chrono::steady_clock::now() + 30s;
  parallel_for(0, 30, 10, [&](int64_t, int64_t) {
    ++begun;
    while (begun < 3 && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
    if (begun < 3) met = false;
  });
  EXPECT_TRUE(met) << "a range waited for ranges that begin after it";
}

TEST(ParallelFor, CoversEveryElementOnce) {
  for (const int threads : {1, 2, 5}) {
    const ThreadCount count(threads);
    for (const int64_t numel : {0, 1, 9, 10, 1001}) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(numel));
      parallel_for(0, numel, 10, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i) ++visits[static_cast<size_t>(i)];
      });
      for (const auto& each : visits) EXPECT_EQ(each, 1);
    }
  }
}

TEST(ParallelFor, ThrowsWhatARangeThrows) {
  const ThreadCount two(2);
  EXPECT_THROW(parallel_for(0, 20, 10,
                            [](int64_t from, int64_t) {
                              if (from != 0) throw std::runtime_error("second");
                            }),
               std::runtime_error);
}

}  // namespace
}  // namespace trireme
