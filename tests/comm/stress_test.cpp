#include <chrono>
#include <random>
#include <thread>

#include "tests/comm/collective_calls.h"
#include "tests/comm/collective_cases.h"

namespace trireme {
namespace {

TEST(Oversubscribed, EightRanksOnFewCoresAreRight) {
  run_ranks(8,
            [](Rank& rank) {
              for (const int64_t numel : {int64_t{7}, int64_t{5000}, int64_t{600011}}) {
                for (int round = 0; round < 5; ++round) {
                  at::Tensor tensor = at::full({numel}, rank.id() + 1.0);
                  rank.world().all_reduce(tensor).wait();
                  ASSERT_EQ(tensor[numel - 1].item<float>(), 36.0F);
                  ASSERT_EQ(tensor.min().item<float>(), 36.0F);
                }
              }
            },
            {.backend = RankBackend::kShm});
}

/// Ranks arrive in an order that changes from call to call, with and without sleeping peers, waited for late or early.
TEST(Skew, ChangesNoResult) {
  run_ranks(4, [](Rank& rank) {
    std::mt19937 own(static_cast<unsigned>(rank.id()));
    std::mt19937 common(99);
    for (int round = 0; round < 300; ++round) {
      const int64_t numel = 1 + static_cast<int64_t>(common() % 40000);
      at::Tensor tensor = at::full({numel}, rank.id() + round * 1.0);
      at::Tensor whole = at::zeros({numel});
      const ShardRange mine = shard_range(numel, rank.size(), rank.id());
      whole.slice(0, mine.begin, mine.end).fill_(rank.id() + 1.0);
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
      auto reduced = rank.world().all_reduce(tensor);
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 1000));
      auto gathered = rank.world().all_gather(whole, whole.slice(0, mine.begin, mine.end));
      if (own() % 2 == 0) reduced.wait();
      gathered.wait();
      reduced.wait();
      ASSERT_EQ(tensor[numel - 1].item<float>(), 6.0F + 4.0F * static_cast<float>(round));
      for (int peer = 0; peer < rank.size(); ++peer) {
        const ShardRange part = shard_range(numel, rank.size(), peer);
        if (part.numel() == 0) continue;
        ASSERT_EQ(whole[part.end - 1].item<int>(), peer + 1);
      }
    }
  });
}

}  // namespace
}  // namespace trireme
