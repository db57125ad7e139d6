#include "trireme/base/exact_sum.h"

#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "pager/storage/kernels.h"

namespace trireme {
namespace {

ExactSum sum_of(const std::vector<double>& values) {
  ExactSum sum;
  for (const double value : values) sum.add(value);
  return sum;
}

TEST(ExactSum, LosesNothingThatDoublesWouldRoundAway) {
  EXPECT_EQ(sum_of({0x1p60, 1, 1, 1, 1}).total(), 0x1p60 + 4);  // one by one each 1 would be lost
  EXPECT_EQ(sum_of({0x1p-1074, 0x1p-1074}).total(), 0x1p-1073);
  EXPECT_EQ(sum_of({0x1p-1022, 0x1p-1074}).total(), 0x1p-1022 + 0x1p-1074);
  EXPECT_EQ(sum_of({0x1.8p1023}).total(), 0x1.8p1023);
  EXPECT_EQ(sum_of({}).total(), 0);
}

TEST(ExactSum, HasTheSameBitsInEveryOrderAndGrouping) {
  std::mt19937 random(3);
  std::vector<double> values;
  for (int i = 0; i < 5000; ++i) values.push_back(std::ldexp(random(), static_cast<int>(random() % 200) - 100));
  const double expected = sum_of(values).total();
  for (int round = 0; round < 5; ++round) {
    std::shuffle(values.begin(), values.end(), random);
    const auto middle = values.begin() + static_cast<int64_t>(random() % values.size());
    ExactSum left = sum_of({values.begin(), middle});
    left.add(sum_of({middle, values.end()}));
    EXPECT_EQ(left.total(), expected);
  }
}

TEST(ExactSum, CarriesOverManyAddends) {
  ExactSum sum;
  for (int i = 0; i < (1 << 20); ++i) sum.add(0x1.fffffffffffffp52);
  EXPECT_EQ(sum.total(), 0x1.fffffffffffffp72);
}

TEST(ExactSum, OfWhatIsNotFiniteIsNotFinite) {
  EXPECT_TRUE(std::isnan(sum_of({1, std::numeric_limits<double>::infinity()}).total()));
  ExactSum sum = sum_of({1});
  sum.add(sum_of({std::numeric_limits<double>::quiet_NaN()}));
  EXPECT_TRUE(std::isnan(sum.total()));
}

TEST(SquaresByBlocks, AreTheSameHoweverShardsCutThem) {
  const at::Tensor data = at::randn({5000});
  const auto squares_of = [&](std::vector<int64_t> cuts) {
    ExactSum sum;
    cuts.push_back(data.numel());
    int64_t begin = 0;
    for (const int64_t end : cuts) {
      add_squares(data.const_data_ptr<float>() + begin, at::kFloat, end - begin, sum);
      begin = end;
    }
    return sum.total();
  };
  const double expected = squares_of({});
  EXPECT_NEAR(expected, data.to(at::kDouble).square().sum().item<double>(), 1e-9 * expected);
  EXPECT_EQ(squares_of({2496}), expected);
  EXPECT_EQ(squares_of({32, 64, 3200}), expected);
}

}  // namespace
}  // namespace trireme
