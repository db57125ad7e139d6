#include <vector>

#include "tests/comm/collective_cases.h"

namespace trireme {
namespace {

using Reductions = OnEveryWorld;

/// The fold in rank order, in fp32 (or the dtype itself), rounded once.
at::Tensor folded(int64_t numel, int size, at::ScalarType dtype, ReduceOp op) {
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  at::Tensor result = numbers(numel, 0, dtype).to(narrow ? at::kFloat : dtype);
  for (int rank = 1; rank < size; ++rank) {
    const at::Tensor next = numbers(numel, rank, dtype).to(result.scalar_type());
    if (op == ReduceOp::kMax)
      result = at::maximum(result, next);
    else if (op == ReduceOp::kMin)
      result = at::minimum(result, next);
    else
      result = result + next;
  }
  if (op == ReduceOp::kMean) result = result * static_cast<float>(1.0 / size);
  return result.to(dtype);
}

bool allowed(at::ScalarType dtype, ReduceOp op) {
  if (dtype == at::kBool) return op == ReduceOp::kMax || op == ReduceOp::kMin;
  return op != ReduceOp::kMean || at::isFloatingType(dtype);
}

template <class Body>
void for_each_reduction(const Body& body) {
  for (const at::ScalarType dtype : all_dtypes())
    for (const int64_t numel : lengths(dtype))
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin})
        if (allowed(dtype, op)) body(dtype, numel, op);
}

TEST_P(Reductions, AllReduceGivesEveryRankTheFoldOfAllRanks) {
  run([](Rank& rank) {
    for_each_reduction([&](at::ScalarType dtype, int64_t numel, ReduceOp op) {
      // fp64 multiplies by the double 1/N.
      if (dtype == at::kDouble && op == ReduceOp::kMean) return;
      at::Tensor tensor = numbers(numel, rank.id(), dtype);
      rank.world().all_reduce(tensor, op).wait();
      EXPECT_TRUE(at::equal(tensor, folded(numel, rank.size(), dtype, op)))
          << dtype << " numel " << numel << " op " << static_cast<int>(op);
    });
  });
}

TEST_P(Reductions, ReduceScatterGivesEachRankTheFoldOfItsOwnShard) {
  run([](Rank& rank) {
    for_each_reduction([&](at::ScalarType dtype, int64_t numel, ReduceOp op) {
      if (dtype == at::kDouble && op == ReduceOp::kMean) return;
      const ShardRange own = shard_range(numel, rank.size(), rank.id());
      at::Tensor shard = at::empty({own.numel()}, dtype);
      rank.world().reduce_scatter(shard, numbers(numel, rank.id(), dtype), op).wait();
      EXPECT_TRUE(at::equal(shard, folded(numel, rank.size(), dtype, op).slice(0, own.begin, own.end)))
          << dtype << " numel " << numel << " op " << static_cast<int>(op);
    });
  });
}

TEST_P(Reductions, MeanOfDoublesIsTheSumTimesTheDoubleReciprocal) {
  run([](Rank& rank) {
    at::Tensor tensor = numbers(1000, rank.id(), at::kDouble);
    rank.world().all_reduce(tensor, ReduceOp::kMean).wait();
    EXPECT_TRUE(at::equal(tensor, folded(1000, rank.size(), at::kDouble, ReduceOp::kSum) * (1.0 / rank.size())));
  });
}

TEST_P(Reductions, ReduceScatterWidensToFp32WithoutRounding) {
  run([](Rank& rank) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      const int64_t numel = 8209;
      const ShardRange own = shard_range(numel, rank.size(), rank.id());
      // 256 + 1/4 steps: exact in fp32, not in bf16.
      const at::Tensor input = (numbers(numel, rank.id(), at::kFloat) / 256 + 1).to(dtype);
      at::Tensor expected = at::zeros({numel});
      for (int peer = 0; peer < rank.size(); ++peer)
        expected += (numbers(numel, peer, at::kFloat) / 256 + 1).to(dtype).to(at::kFloat);
      at::Tensor shard = at::empty({own.numel()});
      rank.world().reduce_scatter(shard, input).wait();
      EXPECT_TRUE(at::equal(shard, expected.slice(0, own.begin, own.end))) << dtype;
    }
  });
}

/// Seeded normal numbers, for which the order of summation shows in the last bits.
at::Tensor noise(int64_t numel, int rank, at::ScalarType dtype) {
  std::vector<float> values(static_cast<size_t>(numel));
  uint64_t state = 88172645463325252ULL + static_cast<uint64_t>(rank) * 7919;
  for (float& value : values) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    value = static_cast<float>(static_cast<int64_t>(state) % 1000003) * 1e-4F;
  }
  return at::from_blob(values.data(), {numel}, at::kFloat).to(dtype, false, true);
}

TEST_P(Reductions, SumsOfNoiseAreTheLeftFoldInRankOrderOnEveryRank) {
  run([](Rank& rank) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const int64_t numel : {int64_t{1001}, int64_t{300007}}) {  // both ways of all_reduce
        at::Tensor expected = noise(numel, 0, dtype).to(at::kFloat);
        for (int peer = 1; peer < rank.size(); ++peer) expected = expected + noise(numel, peer, dtype).to(at::kFloat);
        at::Tensor tensor = noise(numel, rank.id(), dtype);
        rank.world().all_reduce(tensor).wait();
        EXPECT_TRUE(at::equal(tensor, expected.to(dtype))) << dtype << " numel " << numel;
      }
    }
  });
}

TEST_P(Reductions, IntegersWrapAround) {
  run([](Rank& rank) {
    at::Tensor tensor = at::full({5}, 100, at::kByte);
    rank.world().all_reduce(tensor).wait();
    EXPECT_EQ(tensor[4].item<uint8_t>(), static_cast<uint8_t>(100 * rank.size()));
  });
}

TEST_P(Reductions, ANaNOfAnyRankStaysANaN) {
  run([](Rank& rank) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      for (int bad = 0; bad < rank.size(); ++bad) {
        at::Tensor tensor = at::full({3}, rank.id() == bad ? std::nan("") : 1.0, at::kBFloat16);
        rank.world().all_reduce(tensor, op).wait();
        EXPECT_TRUE(tensor.isnan().all().item<bool>()) << "op " << static_cast<int>(op) << " rank " << bad;
      }
    }
  });
}

TRIREME_ON_EVERY_WORLD(Reductions);

}  // namespace
}  // namespace trireme
