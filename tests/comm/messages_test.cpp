#include <vector>

#include "tests/comm/collective_cases.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using Messages = OnEveryWorld;

TEST_P(Messages, OfAPairArriveInTheOrderSent) {
  run([](Rank& rank) {
    const int next = (rank.id() + 1) % rank.size();
    const int previous = (rank.id() + rank.size() - 1) % rank.size();
    if (rank.size() == 1) return;
    for (const int64_t numel : lengths()) {
      std::vector<Pending<void>> sends;
      std::vector<at::Tensor> received;
      std::vector<Pending<void>> receipts;
      for (int index = 0; index < 3; ++index) {
        sends.push_back(rank.world().send(numbers(numel, rank.id() + index, at::kFloat), next));
        received.push_back(at::zeros({numel}));
        receipts.push_back(rank.world().recv(received.back(), previous));
      }
      for (auto& receipt : receipts) receipt.wait();
      for (int index = 0; index < 3; ++index)
        EXPECT_TRUE(at::equal(received[static_cast<size_t>(index)], numbers(numel, previous + index, at::kFloat)))
            << numel;
      for (auto& send : sends) send.wait();
    }
  });
}

TEST_P(Messages, ThatCrossEachOtherDoNotBlock) {
  run([](Rank& rank) {
    // Longer than the ring between a pair: a send is complete only when the peer takes it, and every rank sends first.
    const int64_t numel = 1 << 20;
    std::vector<Pending<void>> sends;
    for (int peer = 0; peer < rank.size(); ++peer)
      if (peer != rank.id()) sends.push_back(rank.world().send(numbers(numel, rank.id(), at::kInt), peer));
    for (int peer = rank.size() - 1; peer >= 0; --peer) {
      if (peer == rank.id()) continue;
      at::Tensor tensor = at::zeros({numel}, at::kInt);
      rank.world().recv(tensor, peer).wait();
      EXPECT_TRUE(at::equal(tensor, numbers(numel, peer, at::kInt)));
    }
    for (auto& send : sends) send.wait();
  });
}

TEST_P(Messages, AreReceivedInAnyOrderOfPeers) {
  run([](Rank& rank) {
    if (rank.id() > 0) return rank.world().send(at::full({4}, rank.id() * 1.0), 0).wait();
    for (int peer = rank.size() - 1; peer > 0; --peer) {
      at::Tensor tensor = at::zeros({4});
      rank.world().recv(tensor, peer).wait();
      EXPECT_EQ(tensor[3].item<int>(), peer);
    }
  });
}

TRIREME_ON_EVERY_WORLD(Messages);

TEST(MessageThatDoesNotFit, IsAnErrorThatNamesBothCalls) {
  const auto mismatch = [](Rank& rank) {
    at::Tensor tensor = at::zeros({rank.id() == 0 ? 10 : 12});
    rank.id() == 0 ? rank.world().send(tensor, 1).wait() : rank.world().recv(tensor, 0).wait();
    rank.world().barrier();
  };
  for (const RankBackend backend : {RankBackend::kThreads, RankBackend::kC10d}) {
    try {
      run_ranks(2, mismatch, {.backend = backend});
      FAIL() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDiverged);
      EXPECT_NE(std::string(error.what()).find("numel 10"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("numel 12"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace trireme
