// Cases of the tests of groups over devices: transports, each over fake devices, and ranks that have a device
// each.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/comm/collective_cases.h"
#include "tests/support/fake_device/fake_cuda.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/run_ranks.h"
#include "trireme/device/stream.h"

namespace trireme {

enum class DeviceTransportKind {
  kNccl,
  kNcclInRankOrder,
  kCudaIpc,
  kCudaIpcInSteps,      ///< through slots so small that most calls take several steps
  kCudaIpcOnOneDevice,  ///< all ranks share a device
};

/// A body's view of its rank. Its current stream is its own.
class DeviceRank {
 public:
  DeviceRank(Rank& rank, Group& group, c10::Device device) : rank_(rank), group_(group), device_(device) {}
  int id() const { return rank_.id(); }
  int size() const { return rank_.size(); }
  Group& host() const { return rank_.world(); }
  Group& group() const { return group_; }
  c10::Device device() const { return device_; }
  at::TensorOptions on_device(at::ScalarType dtype = at::kFloat) const {
    return at::TensorOptions().device(device_).dtype(dtype);
  }

 private:
  Rank& rank_;
  Group& group_;
  const c10::Device device_;
};

inline std::unique_ptr<Group> make_device_group(DeviceTransportKind kind, Group& host, c10::Device device) {
  switch (kind) {
    case DeviceTransportKind::kNccl:
      return testing::make_fake_nccl_group(host, device);
    case DeviceTransportKind::kNcclInRankOrder:
      return testing::make_fake_nccl_group(host, device, {.sums = NcclGroupOptions::Sums::kInRankOrder});
    case DeviceTransportKind::kCudaIpcInSteps:
      return testing::make_fake_cuda_ipc_group(host, device, {.slot_bytes = 4 * 4096, .message_bytes = 4096});
    default:
      return testing::make_fake_cuda_ipc_group(host, device);
  }
}

/// run_ranks() with a group over devices, which is made and destroyed on each rank.
inline void run_device_ranks(DeviceTransportKind kind, int size, const std::function<void(DeviceRank&)>& body,
                             const RunOptions& options = {}) {
  run_ranks(
      size,
      [&](Rank& rank) {
        const auto device = testing::fake_device(kind == DeviceTransportKind::kCudaIpcOnOneDevice ? 0 : rank.id());
        const OnStream own{SideStream(device)};
        const auto group = make_device_group(kind, rank.world(), device);
        rank.world().barrier();  // all ranks have theirs
        DeviceRank device_rank(rank, *group, device);
        body(device_rank);
      },
      options);
}

/// The line of a flight record that begins with `call`.
inline std::string line_of(const std::string& flight_record, const std::string& call) {
  const size_t begin = ("\n" + flight_record).find("\n" + call);
  return begin == std::string::npos ? "" : flight_record.substr(begin, flight_record.find('\n', begin) - begin);
}

inline std::string name_of(DeviceTransportKind kind) {
  switch (kind) {
    case DeviceTransportKind::kNccl:
      return "Nccl";
    case DeviceTransportKind::kNcclInRankOrder:
      return "NcclInRankOrder";
    case DeviceTransportKind::kCudaIpc:
      return "CudaIpc";
    case DeviceTransportKind::kCudaIpcInSteps:
      return "CudaIpcInSteps";
    case DeviceTransportKind::kCudaIpcOnOneDevice:
      return "CudaIpcOnOneDevice";
  }
  return "";
}

/// A test on every transport, after which nothing may have raced, unless it says so: what a group that fails leaves on
/// its streams runs in no order.
class OnEveryTransport : public ::testing::TestWithParam<DeviceTransportKind> {
 protected:
  void TearDown() override {
    if (may_race_) return;
    EXPECT_EQ(record_.races(), std::vector<std::string>());
  }
  void let_race() { may_race_ = true; }
  void run(int size, const std::function<void(DeviceRank&)>& body, const RunOptions& options = {}) const {
    run_device_ranks(GetParam(), size, body, options);
  }
  const testing::FakeRecord& record() const { return record_; }

 private:
  testing::FakeRecord record_;
  bool may_race_ = false;
};

#define TRIREME_ON_EVERY_TRANSPORT(suite)                                                                         \
  INSTANTIATE_TEST_SUITE_P(Transports, suite,                                                                     \
                           ::testing::Values(DeviceTransportKind::kNccl, DeviceTransportKind::kNcclInRankOrder,   \
                                             DeviceTransportKind::kCudaIpc, DeviceTransportKind::kCudaIpcInSteps, \
                                             DeviceTransportKind::kCudaIpcOnOneDevice),                           \
                           [](const auto& info) { return name_of(info.param); })

}  // namespace trireme
