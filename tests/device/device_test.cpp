#include "trireme/device/device.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "device/driver.h"
#include "tests/support/error_of.h"
#include "tests/support/fake_device/fake_device.h"
#include "trireme/base/error.h"
#include "trireme/device/stream.h"

namespace trireme {
namespace {

using namespace testing;

const c10::Device kHost(c10::kCPU);

TEST(Device, AutoIsTheHostWhereThereIsNoGpu) {
  if (count_gpus() > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(choose_device("auto", 3), kHost);
}

TEST(Device, AListHasEachGpuOrTheReasonWhyThereAreNone) {
  const GpuList list = list_gpus();
  EXPECT_EQ(static_cast<int>(list.gpus.size()), count_gpus());
  EXPECT_EQ(list.problem.empty(), !list.gpus.empty());
  for (size_t i = 0; i < list.gpus.size(); ++i) {
    EXPECT_GT(list.gpus[i].bytes, int64_t{1} << 30);
    EXPECT_EQ(list.gpus[i].name, device_name(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(i))));
  }
}

TEST(Device, RanksTakeTheGpusInTurns) {
  if (count_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  EXPECT_EQ(choose_device("auto", count_gpus() + 1).index(), 1 % count_gpus());
}

TEST(Device, AGpuThatIsNotThereIsRefusedByName) {
  const std::string text = error_of<ConfigError>([] { choose_device("cuda:99", 0); });
  EXPECT_SAYS(text, "device \"cuda:99\"");
}

TEST(Device, AnotherNameIsRefusedWithTheOnesThereAre) {
  for (const char* name : {"gpu", "cuda:", "cuda:-1", "cuda:1x", ""}) {
    const std::string text = error_of<ConfigError>([&] { choose_device(name, 0); });
    EXPECT_SAYS(text, "auto, cpu, cuda and cuda:N");
  }
}

// A suite of its own: what is loaded stays.
TEST(CudaHalf, IsFoundAndSaysWhatItLacks) {
  if (count_gpus() > 0) GTEST_SKIP() << "there is a GPU";
  const std::string text = error_of<Error>([] { load_cuda(); });
  const bool is_there = text.find("was loaded and brought no CUDA device") != std::string::npos;
  EXPECT_TRUE(is_there || text.find("libtorch has no CUDA half here") != std::string::npos) << text;
}

TEST(Device, TheHostHasNoDeviceMemoryAndIsNamedCpu) {
  EXPECT_EQ(device_name(kHost), "cpu");
  EXPECT_EQ(device_memory(kHost).bytes, 0);
  EXPECT_FALSE(pinned_memory(4, at::kFloat, kHost).is_pinned());
}

TEST(Event, OrdersWhatWaitsForItAfterWhatWasBefore) {
  FakeRecord record;
  const at::Tensor values = at::zeros({4}, at::TensorOptions().device(fake_device()));
  const Event written = Event::record(fake_device());
  const SideStream side(fake_device());
  at::Tensor sum;
  {
    const OnStream on(side);
    written.stream_wait();
    sum = values.add(1);
  }
  EXPECT_EQ(record.races(), std::vector<std::string>());
  EXPECT_EQ(record.host_waits(), 0);
}

TEST(Event, IsRecordedOnTheStreamThatIsCurrent) {
  FakeRecord record;
  at::Tensor values = at::zeros({4}, at::TensorOptions().device(fake_device()));
  const SideStream side(fake_device());
  {
    const Event written = Event::record(fake_device());
    const OnStream on(side);
    written.stream_wait();
    values.add_(1);
  }
  Event::record(fake_device()).stream_wait();  // of the main stream, which knows nothing of the other one
  values.add_(1);
  EXPECT_FALSE(record.races().empty());
}

TEST(Event, OnTheHostIsCompleteAlready) {
  const Event event = Event::record(kHost);
  const OnStream on{SideStream(kHost)};
  event.stream_wait();
  event.synchronize();
  EXPECT_TRUE(event.is_complete());
  EXPECT_TRUE(Event().is_complete());
}

}  // namespace
}  // namespace trireme
