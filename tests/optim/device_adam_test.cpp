// The kernel that a GPU runs, on the host and on the fake device: the bits of adam_in_one_pass(), whatever the
// stretches. And that NVRTC takes its text, which needs no GPU.
#include "optim/device_adam.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "optim/adam.h"
#include "optim/device_update.h"
#include "tests/optim/adam_lists.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/device/nvidia_library.h"

namespace trireme {
namespace {

using namespace testing;

class DeviceAdam : public ::testing::TestWithParam<AdamTypes> {
 protected:
  OptimizerOptions options() const {
    return {.kind = std::get<0>(GetParam()), .lr = 3e-3, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1};
  }
  AdamLists lists(const std::vector<int64_t>& sizes, c10::Device device = c10::Device(c10::kCPU)) const {
    return adam_lists(sizes, std::get<1>(GetParam()), std::get<2>(GetParam()), device);
  }
};

TEST_P(DeviceAdam, HasTheBitsOfTheHost) {
  const AdamLists expected = lists(kAdamSizes);
  adam_on_host(expected, options(), 0.25);
  for (const c10::Device device : {c10::Device(c10::kCPU), fake_device()}) {
    FakeRecord record;
    ASSERT_TRUE(has_adam_kernel(device));
    const AdamLists got = lists(kAdamSizes, device);
    adam_on_device(got, options(), number(3e-3, device), number(0.25, device), number(0, device));
    EXPECT_EQ(difference(got, expected), "") << device;
    EXPECT_EQ(record.races(), std::vector<std::string>());
  }
}

TEST_P(DeviceAdam, LeavesASkippedStepAlone) {
  const AdamLists got = lists({100, 20000});
  adam_on_device(got, options(), number(3e-3), number(1), number(1));
  EXPECT_EQ(difference(got, lists({100, 20000})), "");
}

TEST_P(DeviceAdam, WithoutAFactorAndASkipTakesGradientsAsTheyAre) {
  const AdamLists got = lists({8191}), expected = lists({8191});
  adam_on_device(got, options(), number(3e-3), {}, {});
  adam_on_host(expected, options(), 1);
  EXPECT_EQ(difference(got, expected), "");
}

// More than one launch takes; each stretch is at another step.
TEST_P(DeviceAdam, TakesMoreStretchesThanALaunch) {
  for (const int64_t count : {55, 56, 57, 150}) {
    const std::vector<int64_t> sizes(static_cast<size_t>(count), 33);
    const AdamLists got = lists(sizes), expected = lists(sizes);
    adam_on_device(got, options(), number(3e-3), {}, {});
    adam_on_host(expected, options(), 1);
    EXPECT_EQ(difference(got, expected), "") << count;
  }
}

// Where there is no kernel ATen's are the way: the same step, rounded in other places.
TEST_P(DeviceAdam, ByAtensKernelsComesToTheSame) {
  const AdamLists by_kernel = adam_lists({4096}, std::get<1>(GetParam()), at::kFloat),
                  by_aten = adam_lists({4096}, std::get<1>(GetParam()), at::kFloat);
  for (const AdamLists* lists : {&by_kernel, &by_aten}) {
    const UpdateSpan span{lists->masters[0], lists->weights[0], lists->gradients[0], lists->first[0], lists->second[0]};
    // Without the hard values, over which no two ways need to agree.
    const DeviceRun run{span.slice(100, 4000), lists->steps[0]};
    update_on_device({run}, options(), {.gradient_factor = number(0.25)}, number(3e-3), lists == &by_kernel);
    EXPECT_TRUE(at::equal(run.span.weights, run.span.master.to(run.span.weights.scalar_type())));
  }
  EXPECT_NE(difference(by_kernel, by_aten), "");
  EXPECT_TRUE(by_kernel.masters[0].slice(0, 100, 4000).allclose(by_aten.masters[0].slice(0, 100, 4000), 1e-4, 1e-6));
}

TEST(AdamKernel, RefusesWhatNoKernelCouldSee) {
  AdamLists lists = adam_lists({10, 20}, at::kHalf, at::kFloat);
  const auto step = [&] { adam_on_device(lists, {.kind = OptimizerKind::kAdam}, number(1e-3), {}, {}); };
  step();
  lists.first[1] = lists.first[1].narrow(0, 0, 19);
  EXPECT_THROW(step(), Error);
  lists.first.pop_back();
  EXPECT_THROW(step(), Error);
}

INSTANTIATE_TEST_SUITE_P(Types, DeviceAdam, all_adam_types(), adam_types_name);

TEST(AdamKernel, IsForAllRanksOrNone) {
  run_ranks(3, [](Rank& rank) {
    EXPECT_TRUE(is_true_on_all(rank.world(), true));
    EXPECT_FALSE(is_true_on_all(rank.world(), rank.id() != 1));
  });
}

bool has_nvrtc() {
  std::string problem;
  return open_nvidia_library("libnvrtc.so.13", "cu13", problem) != nullptr ||
         open_nvidia_library("libnvrtc.so.12", "cuda_nvrtc", problem) != nullptr;
}

TEST(AdamKernel, IsTakenByNvrtcForEveryArchitecture) {
  if (!has_nvrtc()) GTEST_SKIP() << "NVRTC is not installed";
  for (const char* architecture : {"sm_80", "sm_90", "sm_100", "sm_120"}) {
    const std::string code = compile_kernel(adam_kernel_text(), architecture);
    EXPECT_EQ(code.substr(1, 3), "ELF");
    EXPECT_NE(code.find("trireme_adam"), std::string::npos);
  }
}

TEST(CompileKernel, SaysWhatIsWrong) {
  if (!has_nvrtc()) GTEST_SKIP() << "NVRTC is not installed";
  const auto message = [](const char* text, const char* architecture) -> std::string {
    try {
      (void)compile_kernel({"broken", text, {}}, architecture);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message("not_a_type x;", "sm_80").find("not_a_type"), std::string::npos);
  EXPECT_NE(message("", "sm_1").find("sm_1"), std::string::npos);
}

TEST(DeviceSteps, TellsApartParametersThatWereTouchedInOtherUpdates) {
  // Both would have the history 66 as a sum in base 31: of the updates 1 and 3, and of the 65th alone.
  DeviceSteps steps(2, c10::Device(c10::kCPU));
  for (int update = 1; update <= 65; ++update) steps.begin({update == 1 || update == 3, update == 65});
  EXPECT_NE(steps.histories()[0], steps.histories()[1]);
  EXPECT_EQ(steps.read(), (std::vector<int64_t>{2, 1}));
}

}  // namespace
}  // namespace trireme
