// Which layers are on which stage.
#include "trireme/schedule/partition.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme::pipeline {
namespace {

using Bounds = std::vector<int64_t>;

TEST(Partition, UniformGivesTheFirstStagesOneMore) {
  EXPECT_EQ(partition_uniform(10, 4), (Bounds{0, 3, 6, 8, 10}));
  EXPECT_EQ(partition_uniform(8, 4), (Bounds{0, 2, 4, 6, 8}));
  EXPECT_EQ(partition_uniform(2, 4), (Bounds{0, 1, 2, 2, 2}));
}

TEST(Partition, BalancedByWeights) {
  EXPECT_EQ(partition_balanced({1, 1, 1, 1}, 2), (Bounds{0, 2, 4}));
  EXPECT_EQ(partition_balanced({100, 1, 1, 1, 100}, 3), (Bounds{0, 1, 4, 5}));
  EXPECT_EQ(partition_balanced({5, 0, 0, 5}, 2), (Bounds{0, 3, 4}));  // of equal ones the later begin
  EXPECT_EQ(partition_balanced({7, 7}, 4), (Bounds{0, 1, 2, 2, 2}));
  EXPECT_THROW((void)partition_balanced({1, -1, 2}, 2), ConfigError);
  EXPECT_THROW((void)partition_balanced({1}, 0), ConfigError);
}

TEST(Partition, WithinALimitOfMemoryTheHeaviestStageIsTheLightest) {
  const Bounds weights = {4, 1, 1, 1, 1, 4};
  EXPECT_EQ(partition_within(weights, 2, {0, 0, 0, 0, 0, 0}, 0), (Bounds{0, 3, 6}));
  EXPECT_EQ(partition_within(weights, 2, {1, 1, 5, 5, 1, 1}, 8), (Bounds{0, 3, 6}));
  EXPECT_EQ(partition_within(weights, 2, {6, 1, 1, 0, 0, 0}, 7), (Bounds{0, 2, 6}));  // times 5 and 7, not 6 and 6
  EXPECT_EQ(partition_within({2, 3}, 4, {1, 1}, 1), (Bounds{0, 1, 2, 2, 2}));
  try {
    (void)partition_within(weights, 3, {3, 3, 3, 3, 3, 3}, 5);
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "pipeline: no partition over 3 stages stays within 5 bytes; the least for which there is one is 6");
  }
  EXPECT_THROW((void)partition_within({1, 2}, 1, {1}, 5), ConfigError);
}

TEST(Partition, ByTypeCountsMatchingLayersAlone) {
  EXPECT_EQ(partition_by_type({"Embedding", "Block", "Block", "Block", "Block", "Norm"}, "block", 2),
            (Bounds{0, 3, 6}));
  try {
    (void)partition_by_type({"Embedding", "Block", "Block"}, "Layer", 2);
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "partition_method: no layer's class matches \"type:Layer\"; the classes are Embedding, Block");
  }
  EXPECT_THROW((void)partition_by_type({"Block"}, "(", 1), ConfigError);
}

}  // namespace
}  // namespace trireme::pipeline
