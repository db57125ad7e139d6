// The optimizer's own kernel on a real GPU: skipped where there is none. The host and the GPU round alike, so bits are
// compared.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "tests/optim/adam_lists.h"
#include "trireme/device/device.h"

namespace trireme {
namespace {

using namespace testing;

class GpuAdam : public ::testing::TestWithParam<std::tuple<OptimizerKind, at::ScalarType, at::ScalarType>> {};

TEST_P(GpuAdam, HasTheBitsOfTheHost) {
  if (count_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  const auto& [kind, weights, gradients] = GetParam();
  const c10::Device device = choose_device("cuda", 0);
  ASSERT_TRUE(has_adam_kernel(device)) << "the warning above says why";
  const OptimizerOptions options{.kind = kind, .lr = 3e-3, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1};
  std::vector<int64_t> sizes = kAdamSizes;
  sizes.resize(150, 5000);
  for (const double skip : {0.0, 1.0}) {
    const AdamLists expected = adam_lists(sizes, weights, gradients);
    if (skip == 0) adam_on_host(expected, options, 0.25);
    const AdamLists got = to_device(adam_lists(sizes, weights, gradients), device);
    adam_on_device(got, options, number(3e-3, device), number(0.25, device), number(skip, device));
    EXPECT_EQ(difference(got, expected), "") << "skip " << skip;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, GpuAdam,
                         ::testing::Combine(::testing::Values(OptimizerKind::kAdam, OptimizerKind::kAdamW),
                                            ::testing::Values(at::kBFloat16, at::kHalf),
                                            ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf)),
                         [](const auto& info) {
                           return std::string(optimizer_name(std::get<0>(info.param))) +
                                  c10::toString(std::get<1>(info.param)) + "By" +
                                  c10::toString(std::get<2>(info.param));
                         });

}  // namespace
}  // namespace trireme
