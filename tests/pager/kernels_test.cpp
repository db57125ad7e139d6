#include "pager/storage/kernels.h"

#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace trireme {
namespace {

// One lane, one block, their neighbours, and several blocks with a rest.
const std::vector<int64_t> kLengths = {0, 1, 15, 16, 17, 2047, 2048, 2049, 5000};

double reduce_into(at::Tensor& target, const std::vector<at::Tensor>& sources, float factor = 1,
                   bool accumulate = false) {
  ReduceTask task;
  for (const at::Tensor& source : sources) task.sources.push_back(source.const_data_ptr());
  task.source_dtype = sources[0].scalar_type();
  task.target = target.data_ptr();
  task.target_dtype = target.scalar_type();
  task.numel = target.numel();
  task.factor = factor;
  task.accumulate = accumulate;
  return reduce(task);
}

TEST(Reduce, FoldsInTheOrderOfTheRanks) {
  for (const int64_t n : kLengths) {
    const std::vector<at::Tensor> sources = {at::randn({n}), at::randn({n}).mul(1e4), at::randn({n}).mul(1e-4)};
    at::Tensor target = at::zeros({n});
    reduce_into(target, sources);
    EXPECT_TRUE(at::equal(target, (sources[0] + sources[1]) + sources[2])) << n;
  }
}

TEST(Reduce, ScalesTheSumAndThenAddsIt) {
  for (const int64_t n : kLengths) {
    const std::vector<at::Tensor> sources = {at::randn({n}), at::randn({n})};
    at::Tensor target = at::randn({n});
    const at::Tensor expected = target + (sources[0] + sources[1]) * 0.3f;
    reduce_into(target, sources, 0.3f, true);
    EXPECT_TRUE(at::equal(target, expected)) << n;
  }
}

TEST(Reduce, Of16BitDtypesSumsInFloatAndRoundsOnce) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    for (const int64_t n : kLengths) {
      std::vector<at::Tensor> sources;
      at::Tensor sum = at::zeros({n});
      for (int i = 0; i < 3; ++i) {
        sources.push_back(at::randn({n}).to(dtype));
        sum += sources.back().to(at::kFloat);
      }
      at::Tensor wide = at::zeros({n});
      at::Tensor narrow = at::zeros({n}, dtype);
      reduce_into(wide, sources);
      reduce_into(narrow, sources);
      EXPECT_TRUE(at::equal(wide, sum)) << dtype << ", " << n;
      EXPECT_TRUE(at::equal(narrow, sum.to(dtype))) << dtype << ", " << n;
      reduce_into(narrow, {wide}, 2, true);
      EXPECT_TRUE(at::equal(narrow, (sum.to(dtype).to(at::kFloat) + sum * 2).to(dtype))) << dtype << ", " << n;
    }
}

TEST(Reduce, OfFp16RoundsEveryHalfWayCaseAndSpecialValueAsLibtorchDoes) {
  std::vector<float> values = {65519.996f,
                               65520.0f,
                               1e30f,
                               -1e30f,
                               std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::denorm_min(),
                               -0.0f};
  for (uint16_t bits = 0; bits < 0x7BFF; ++bits) {
    const float low = c10::Half(bits, c10::Half::from_bits());
    const float high = c10::Half(static_cast<uint16_t>(bits + 1), c10::Half::from_bits());
    const float middle = (low + high) / 2;
    for (const float value : {low, middle, std::nextafter(middle, low), std::nextafter(middle, high)})
      values.push_back(bits % 2 == 0 ? value : -value);
  }
  const at::Tensor source = at::tensor(values);
  at::Tensor target = at::zeros({source.numel()}, at::kHalf);
  const double squares = reduce_into(target, {source});
  EXPECT_FALSE(std::isfinite(squares));  // of what was stored: 65520 is infinite in fp16
  EXPECT_TRUE(at::equal(target.view(at::kShort), source.to(at::kHalf).view(at::kShort)));
  at::Tensor wide = at::zeros({source.numel()});
  reduce_into(wide, {target});
  EXPECT_TRUE(at::equal(wide, target.to(at::kFloat)));
  at::Tensor rounded = at::zeros({3}, at::kHalf);
  reduce_into(rounded, {at::full({3}, std::nanf(""))});
  EXPECT_TRUE(rounded.isnan().all().item<bool>());
}

TEST(Reduce, RoundsEveryHalfWayCaseAndSpecialValueAsLibtorchDoes) {
  std::vector<float> values = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(), -0.0f};
  for (uint32_t high = 0; high < 0x8000; high += 7)
    for (const uint32_t low : {0x0000u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
      if (const float value = std::bit_cast<float>(high << 16 | low); !std::isnan(value)) values.push_back(value);
  const at::Tensor source = at::tensor(values);
  at::Tensor target = at::zeros({source.numel()}, at::kBFloat16);
  reduce_into(target, {source});
  const auto* bits = static_cast<const c10::BFloat16*>(target.const_data_ptr());
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(bits[i].x, c10::BFloat16(values[i]).x) << values[i];
  const at::Tensor nan = at::full({3}, std::nanf(""));
  at::Tensor rounded = at::zeros({3}, at::kBFloat16);
  reduce_into(rounded, {nan});
  EXPECT_TRUE(rounded.isnan().all().item<bool>());
}

TEST(Reduce, ReturnsTheSumOfSquaresOfWhatItStored) {
  for (const int64_t n : kLengths) {
    // 1 + 2 + … in quarters: squares and their sums are exact in fp64.
    const at::Tensor source = at::arange(n, at::kFloat).mul(0.25);
    at::Tensor target = at::zeros({n});
    const double expected = static_cast<double>((n - 1) * n * (2 * n - 1) / 6) / 16;
    EXPECT_EQ(reduce_into(target, {source}), n == 0 ? 0 : expected) << n;
    EXPECT_EQ(sum_of_squares(target.const_data_ptr(), at::kFloat, n), n == 0 ? 0 : expected) << n;
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      at::Tensor narrow = at::zeros({n}, dtype);
      const double stored = reduce_into(narrow, {source});
      EXPECT_EQ(stored, narrow.to(at::kDouble).square().sum().item<double>()) << n;
      EXPECT_EQ(stored, sum_of_squares(narrow.const_data_ptr(), dtype, n)) << n;
    }
  }
}

TEST(SumOfSquares, IsTheSameBitsWhereverTheDataStands) {
  const at::Tensor data = at::randn({3001});
  const double expected = sum_of_squares(data.const_data_ptr(), at::kFloat, 3000);
  for (int64_t shift = 1; shift < 9; ++shift) {
    at::Tensor moved = at::zeros({3100});
    moved.narrow(0, shift, 3000).copy_(data.narrow(0, 0, 3000));
    EXPECT_EQ(sum_of_squares(moved.narrow(0, shift, 3000).const_data_ptr(), at::kFloat, 3000), expected);
  }
}

}  // namespace
}  // namespace trireme
