#include "trireme/observe/compute_rate.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

TEST(ComputeRate, IsTheWorkOfTheTokensSharedByTheRanks) {
  const ComputeRate rate = {.flops_per_token = 6e9, .ranks = 4};
  EXPECT_DOUBLE_EQ(rate.tflops_per_rank(200'000).value(), 300);  // 200,000 * 6e9 / 4 / 1e12
  EXPECT_FALSE(rate.mfu(200'000)) << "no peak is known";
}

TEST(ComputeRate, OfThePeakOfOneRankIsTheUtilization) {
  const ComputeRate rate = {.flops_per_token = 6e9, .ranks = 4, .peak_tflops = 1200};
  EXPECT_DOUBLE_EQ(rate.mfu(200'000).value(), 0.25);
}

TEST(ComputeRate, IsNotKnownWithoutTheWorkOfAToken) {
  const ComputeRate rate = {.peak_tflops = 1200};
  EXPECT_FALSE(rate.tflops_per_rank(1));
  EXPECT_FALSE(rate.mfu(1));
}

}  // namespace
}  // namespace trireme
