// A rank that dies or stops while its peers wait for it on their devices: in processes, over a transport that waits for
// ever, since the fakes of the others are in one process each.
#include <gtest/gtest.h>
#include <signal.h>

#include <ATen/ops/ones.h>

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <numeric>
#include <regex>

#include "comm/backends/device/device_backend.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/processes.h"
#include "trireme/base/log.h"
#include "trireme/comm/world.h"

namespace trireme {
namespace {

using namespace testing;

class WaitsForEver final : public comm::DeviceTransport {
 public:
  explicit WaitsForEver(c10::Device device) : device_(device) {}
  void collect(const comm::Request&) override {
    FakeJoint::enqueue(joint_, {current_stream(device_), {}, {}}, [] {});
  }
  void pass(const comm::Request&) override {}
  std::string problem() noexcept override { return ""; }
  void release() noexcept override { FakeJoint::release(joint_, device_); }
  void close() noexcept override {}

 private:
  const c10::Device device_;
  const std::shared_ptr<FakeJoint> joint_ = std::make_shared<FakeJoint>("for ever", 2);
};

/// argument: "dies", "stops", or anything else to leave.
int wait_on_the_device(Group& world, const std::string& argument) {
  Group group(std::make_unique<comm::DeviceBackend>(
      world.clone("devices"), fake_device(world.rank()),
      [](const comm::TransportSite& site) { return std::make_shared<WaitsForEver>(site.device); }));
  world.barrier();
  if (world.rank() == 1 && argument == "dies") ::raise(SIGKILL);
  if (world.rank() == 1 && argument == "stops") ::raise(SIGSTOP);
  if (world.rank() == 1) return 0;
  const at::Tensor tensor = at::ones({9}, at::TensorOptions().device(fake_device(world.rank())));
  auto pending = group.all_reduce(tensor, ReduceOp::kSum);
  while (!pending.done()) ::usleep(1000);
  pending.wait();
  return 0;
}

TEST(DeviceDeath, IsNamedByEverySurvivor) {
  const auto results = run_processes(3, wait_on_the_device, {.argument = "dies"});
  for (const int rank : {0, 2}) {
    const ProcessResult& result = results[static_cast<size_t>(rank)];
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_LT(result.seconds, 30);
    EXPECT_NE(result.error_text.find("rank 1 (pid "), std::string::npos) << result.error_text;
    EXPECT_NE(result.error_text.find("died while rank "), std::string::npos) << result.error_text;
    EXPECT_NE(result.error_text.find("in all_reduce #1 (numel 9, float32 on fake, sum) of group 'devices'"),
              std::string::npos)
        << result.error_text;
  }
}

TEST(StoppedRank, IsNamedInOneWarningWhileItsPeersWaitForTheirDevice) {
  const auto results = run_processes(2, [](Group&, const std::string&) {
    set_log_sink([](LogLevel, const std::string& message) { std::fprintf(stderr, "%s\n", message.c_str()); });
    ::setenv("TRIREME_WARN_AFTER_S", "0.2", 1);
    ::setenv("TRIREME_TIMEOUT_S", "2.5", 1);
    return wait_on_the_device(*init().group, "stops");
  });
  const std::regex warning(
      "comm: rank 1 \\(pid ([0-9]+)\\) is stopped, by SIGSTOP or a debugger, and rank 0 waits in "
      "all_reduce #1 [^\n]*of group 'devices' after [0-9.]+ s; [^\n]*`kill -CONT \\1` lets it go on");
  const std::string& text = results[0].error_text;
  EXPECT_EQ(std::distance(std::sregex_iterator(text.begin(), text.end(), warning), std::sregex_iterator()), 1) << text;
}

TEST(DeviceDeath, IsNotWhatAGoodEndIsCalled) {
  const auto results = run_processes(2, wait_on_the_device, {.argument = "leaves"});
  EXPECT_EQ(results[1].exit_code, 0);
  EXPECT_NE(results[0].error_text.find("rank 1 left while rank 0 waited for it in all_reduce #1"), std::string::npos)
      << results[0].error_text;
}

}  // namespace
}  // namespace trireme
