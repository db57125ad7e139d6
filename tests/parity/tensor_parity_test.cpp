// A C++ Llama on slices of its layers trains as on one rank.
#include "tests/parity/tensor_parity.h"

namespace trireme::tensor_parity {
namespace {

TEST(TensorParity, EveryStage) {
  for (const int stage : {0, 1, 2, 3}) expect_parity(1, 2, stage);
  for (const int stage : {0, 3}) expect_parity(2, 2, stage);
}

/// Two ranks for each key/value head; 29 tokens and 50 features are cut unevenly.
TEST(TensorParity, MoreRanksThanKeyHeads) { expect_parity(1, 4, 1); }

TEST(TensorParity, TiedEmbeddings) { expect_parity(1, 2, 3, {.is_tied = true}); }

TEST(TensorParity, UnderInit) {
  for (const int data : {1, 2}) expect_parity(data, 2, 3, {.is_under_init = true});
  expect_parity(1, 2, 1, {.is_tied = true, .is_under_init = true});
}

TEST(TensorParity, ShardedTokens) {
  for (const int stage : {0, 3}) expect_parity(1, 2, stage, {.shards_tokens = true});
  expect_parity(1, 4, 1, {.shards_tokens = true});
  expect_parity(2, 2, 2, {.is_tied = true, .shards_tokens = true});
}

/// Two replicas, each of two shards, each of two slices.
TEST(TensorParity, ReplicasOfSlices) {
  for (const int stage : {1, 2, 3}) expect_parity(4, 2, stage, {.replicas = "mics_shard_size"});
  expect_parity(4, 2, 3, {.is_tied = true, .replicas = "zero_hpz_partition_size"});
}

TEST(TensorParity, HeadsThatNobodyHasTold) { expect_parity(1, 2, 2, {.knows_heads = false}); }

}  // namespace
}  // namespace trireme::tensor_parity
