// The optimizer's own kernel on a real GPU: skipped where there is none. The host and the GPU round alike, so bits are
// compared.
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "tests/optim/adam_lists.h"
#include "trireme/device/device.h"
#include "trireme/device/stream.h"

namespace trireme {
namespace {

using namespace testing;

class GpuAdam : public ::testing::TestWithParam<AdamTypes> {};

TEST_P(GpuAdam, HasTheBitsOfTheHost) {
  if (count_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  const auto& [kind, weights, gradients] = GetParam();
  const c10::Device device = choose_device("cuda", 0);
  ASSERT_TRUE(has_adam_kernel(device)) << "the warning above says why";
  const OptimizerOptions options{.kind = kind, .lr = 3e-3, .weight_decay = 0.1};
  std::vector<int64_t> sizes = kAdamSizes;
  sizes.resize(150, 5003);  // most begin where nothing is aligned
  const AdamLists before = adam_lists(sizes, weights, gradients);
  const AdamLists expected = adam_lists(sizes, weights, gradients), unscaled = adam_lists(sizes, weights, gradients);
  adam_on_host(expected, options, 0.25);
  adam_on_host(unscaled, options, 1);
  // On another stream, by a thread that has done nothing on the GPU yet.
  std::thread([&] {
    const SideStream side(device);
    const OnStream on(side);
    const AdamLists got = adam_lists(sizes, weights, gradients, device);
    adam_on_device(got, options, number(3e-3, device), number(0.25, device), number(1, device));
    EXPECT_EQ(difference(got, before), "") << "skipped";
    adam_on_device(got, options, number(3e-3, device), number(0.25, device), number(0, device));
    EXPECT_EQ(difference(got, expected), "");
    const AdamLists plain = adam_lists(sizes, weights, gradients, device);
    adam_on_device(plain, options, number(3e-3, device), {}, {});
    EXPECT_EQ(difference(plain, unscaled), "") << "without a factor";
  }).join();
}

INSTANTIATE_TEST_SUITE_P(Types, GpuAdam, all_adam_types(), adam_types_name);

}  // namespace
}  // namespace trireme
