// Errors of a rank whose peers call other things, are late or gone; its streams are free afterwards.
#include <dlfcn.h>

#include <atomic>
#include <thread>

#include "tests/comm/device_cases.h"
#include "tests/comm/thrown.h"
#include "tests/support/becomes_true.h"
#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/comm/fake.h"
#include "trireme/comm/threads.h"

// Without the headers of NCCL and CUDA there are no such groups to test.
namespace trireme {
namespace {

using namespace testing;
using namespace std::chrono_literals;

class DeviceFaults : public OnEveryTransport {
 protected:
  void SetUp() override { let_race(); }
};

/// The error of `call`, or of the wait for it once it is done: to wait blocks for nobody, so that before it knows of
/// nothing.
Thrown error_of_call(const std::function<Pending<void>()>& call) {
  return thrown_by([&] {
    auto pending = call();
    EXPECT_TRUE(becomes_true([&] { return pending.done(); }));
    pending.wait();
  });
}

TEST_P(DeviceFaults, DifferentCallsAreNamedOnEveryRank) {
  struct Divergence {
    std::function<Pending<void>(Group&, const at::Tensor&six, const at::Tensor&seven)> most, rank_1;
    const char* most_text;
    const char* rank_1_text;
  };
  const std::vector<Divergence> cases{
      {[](Group& g, const at::Tensor& six, const at::Tensor&) { return g.all_reduce(six); },
       [](Group& g, const at::Tensor& six, const at::Tensor&) { return g.broadcast(six, 0); },
       "all_reduce #2 (numel 6, float32 on fake, sum)", "broadcast #2 (numel 6, float32 on fake, root 0)"},
      {[](Group& g, const at::Tensor& six, const at::Tensor&) { return g.all_reduce(six); },
       [](Group& g, const at::Tensor&, const at::Tensor& seven) { return g.all_reduce(seven); }, "numel 6", "numel 7"},
      {[](Group& g, const at::Tensor& six, const at::Tensor&) { return g.all_reduce(six); },
       [](Group& g, const at::Tensor& six, const at::Tensor&) { return g.all_reduce(six, ReduceOp::kMax); }, "sum",
       "max"},
      {[](Group& g, const at::Tensor& six, const at::Tensor&) {
         const SubjectScope scope("layers.3");
         return g.all_reduce(six);
       },
       [](Group& g, const at::Tensor& six, const at::Tensor&) {
         const SubjectScope scope("layers.4");
         return g.all_reduce(six);
       },
       "of layers.3", "of layers.4"},
  };
  for (const Divergence& divergence : cases)
    run(3, [&](DeviceRank& rank) {
      const at::Tensor six = at::ones({6}, rank.on_device());
      const at::Tensor seven = at::ones({7}, rank.on_device());
      rank.group().all_reduce(six).wait();
      rank.host().barrier();
      const Thrown thrown = error_of_call(
          [&] { return (rank.id() == 1 ? divergence.rank_1 : divergence.most)(rank.group(), six, seven); });
      EXPECT_EQ(thrown.code, ErrorCode::kDiverged) << thrown.text;
      EXPECT_TRUE(thrown.has(divergence.most_text)) << thrown.text;
      EXPECT_TRUE(thrown.has(divergence.rank_1_text)) << thrown.text;
      EXPECT_TRUE(thrown.has("rank 1 called")) << thrown.text;
      EXPECT_TRUE(thrown.has("ranks called different operations in group 'world.fake:")) << thrown.text;
    });
}

TEST_P(DeviceFaults, MessagesThatDoNotFitAreNamedOnBothEnds) {
  run(2, [](DeviceRank& rank) {
    const at::Tensor tensor = at::ones({rank.id() + 6}, rank.on_device());
    Thrown thrown =
        error_of_call([&] { return rank.id() == 0 ? rank.group().send(tensor, 1) : rank.group().recv(tensor, 0); });
    // A message that its mailbox has room for is sent before the other end looks at it.
    if (rank.id() == 0 && thrown.code != ErrorCode::kDiverged) thrown = thrown_by([&] { rank.group().barrier(); });
    EXPECT_EQ(thrown.code, ErrorCode::kDiverged) << thrown.text;
    EXPECT_TRUE(thrown.has("send #1 (numel 6, float32 on fake, root 1)")) << thrown.text;
    EXPECT_TRUE(thrown.has("recv #1 (numel 7, float32 on fake, root 0)")) << thrown.text;
  });
}

TEST_P(DeviceFaults, ALateRankIsNamedOnEveryRank) {
  std::atomic<bool> has_thrown{false};
  run(3,
      [&](DeviceRank& rank) {
        const at::Tensor tensor = at::ones({9}, rank.on_device());
        rank.group().all_reduce(tensor).wait();
        rank.host().barrier();
        const Thrown thrown = error_of_call([&] {
          while (rank.id() == 1 && !has_thrown) std::this_thread::sleep_for(1ms);
          return rank.group().all_reduce(tensor, ReduceOp::kMin);
        });
        has_thrown = true;
        EXPECT_EQ(thrown.code, ErrorCode::kTimeout) << thrown.text;
        EXPECT_TRUE(thrown.has("rank 1 did not arrive while rank ")) << thrown.text;
        EXPECT_TRUE(thrown.has("waited for it in all_reduce #2 (numel 9, float32 on fake, min)")) << thrown.text;
        EXPECT_TRUE(thrown.has("rank 1 was last in all_reduce #1 (numel 9, float32 on fake, sum)")) << thrown.text;
      },
      {.timeout = 600ms});
}

TEST_P(DeviceFaults, AnAbortReachesPeersThatWaitOnTheirDevice) {
  run(3, [](DeviceRank& rank) {
    const at::Tensor tensor = at::ones({9}, rank.on_device());
    const Thrown thrown = error_of_call([&] {
      if (rank.id() == 1) rank.group().abort("no more data");
      return rank.group().all_reduce(tensor);
    });
    EXPECT_EQ(thrown.code, ErrorCode::kPeerLost) << thrown.text;
    EXPECT_TRUE(thrown.has("no more data")) << thrown.text;
    if (rank.id() != 1) {
      const std::string line = line_of(rank.group().flight_record(), "all_reduce #1 (numel 9");
      EXPECT_EQ(line.find(", took "), std::string::npos) << line;
    }
    // The device is free: a copy of what is there comes back.
    EXPECT_EQ(tensor.cpu().numel(), 9);
  });
}

TEST_P(DeviceFaults, ARankThatThrowsEndsItsPeersWaits) {
  const Thrown thrown = thrown_by([this] {
    run(3, [](DeviceRank& rank) {
      const at::Tensor tensor = at::ones({9}, rank.on_device());
      if (rank.id() == 1) throw DataError("the data set is empty");
      for (;;) rank.group().all_reduce(tensor).wait();
    });
  });
  EXPECT_TRUE(thrown.has("rank 1: the data set is empty")) << thrown.text;
}

TEST_P(DeviceFaults, ARankThatLeftIsNamed) {
  run_ranks(2, [&](Rank& rank) {
    const auto device = fake_device(GetParam() == DeviceTransportKind::kCudaIpcOnOneDevice ? 0 : rank.id());
    const OnStream own{SideStream(device)};
    auto group = make_device_group(GetParam(), rank.world(), device);
    if (rank.id() == 1) return;
    DeviceRank device_rank(rank, *group, device);
    const at::Tensor tensor = at::ones({9}, device_rank.on_device());
    const Thrown thrown = error_of_call([&] { return group->all_reduce(tensor); });
    EXPECT_EQ(thrown.code, ErrorCode::kPeerLost) << thrown.text;
    EXPECT_TRUE(thrown.has("rank 1 left while rank 0 waited")) << thrown.text;
  });
}

TEST_P(DeviceFaults, AfterAnErrorEveryCallThrowsTheFirstOneAtOnce) {
  run(2, [](DeviceRank& rank) {
    const at::Tensor tensor = at::ones({rank.id() + 2}, rank.on_device());
    const Thrown first = error_of_call([&] { return rank.group().all_reduce(tensor); });
    EXPECT_EQ(first.code, ErrorCode::kDiverged) << first.text;
    const std::vector<std::function<void()>> calls{
        [&] { rank.group().all_reduce(tensor).wait(); },          [&] { rank.group().broadcast(tensor, 0).wait(); },
        [&] { rank.group().send(tensor, 1 - rank.id()).wait(); }, [&] { rank.group().barrier(); },
        [&] { rank.group().all_reduce(at::ones({2})).wait(); },   [&] { rank.group().split({{0, 1}}, "again"); }};
    for (const auto& call : calls) EXPECT_EQ(thrown_by(call).text, first.text);
  });
}

TEST_P(DeviceFaults, TensorsOnAnotherDeviceAreShapeErrorsBeforeAnythingIsSent) {
  run(2, [](DeviceRank& rank) {
    const at::Tensor here = at::ones({4}, rank.on_device());
    const at::Tensor elsewhere = at::ones({4}, at::TensorOptions().device(fake_device(5)));
    const at::Tensor half = at::ones({2});
    const auto says = [](const Thrown& thrown, const char* text) {
      EXPECT_EQ(thrown.code, ErrorCode::kShape) << thrown.text;
      EXPECT_TRUE(thrown.has(text)) << thrown.text;
    };
    says(thrown_by([&] { rank.group().all_gather(here, half).wait(); }),
         "all_gather: expected output and input on one device");
    says(thrown_by([&] { rank.group().all_reduce(elsewhere).wait(); }), "the device of group 'world.fake:");
    says(thrown_by([&] { rank.group().all_reduce(at::Tensor()).wait(); }), "expected a tensor");
    says(thrown_by([&] { rank.group().all_reduce(here.expand({2, 4})).wait(); }), "contiguous");
    says(thrown_by([&] { rank.host().all_reduce(here).wait(); }), "expected tensors on the host");
    EXPECT_EQ(rank.group().memory_sharing(), nullptr);
    rank.group().all_reduce(here).wait();
    EXPECT_TRUE(here.cpu().equal(at::full({4}, 2.0)));
  });
}

TEST_P(DeviceFaults, AGroupThatIsDestroyedUnderACallOfAPeerThatFailedIsNotHeldUp) {
  run(2, [](DeviceRank& rank) {
    if (rank.id() == 1) return rank.group().abort("it had enough");
    const at::Tensor tensor = at::ones({9}, rank.on_device());
    (void)thrown_by([&] { const auto pending = rank.group().all_reduce(tensor); });
  });
}

TEST(NcclFaults, AnErrorInTheBackgroundEndsTheGroup) {
  run_device_ranks(DeviceTransportKind::kNccl, 2, [](DeviceRank& rank) {
    const at::Tensor tensor = at::ones({9}, rank.on_device());
    rank.group().all_reduce(tensor).wait();
    rank.host().barrier();
    if (rank.id() == 1) return rank.host().barrier();  // which never makes the call
    const Thrown thrown = error_of_call([&] {
      auto pending = rank.group().all_reduce(tensor);
      break_fake_nccl();
      return pending;
    });
    rank.host().barrier();
    EXPECT_EQ(thrown.code, ErrorCode::kPeerLost) << thrown.text;
    EXPECT_TRUE(thrown.has("NCCL says: remote error; a peer has gone")) << thrown.text;
  });
}

TEST(NcclFaults, ARankThatThrowsUnderACallDoesNotWaitForItsPeers) {
  const Thrown thrown = thrown_by([] {
    run_device_ranks(DeviceTransportKind::kNccl, 2, [](DeviceRank& rank) {
      if (rank.id() == 0) return rank.host().barrier();  // and never makes the call
      const at::Tensor tensor = at::ones({9}, rank.on_device());
      const auto pending = rank.group().all_reduce(tensor);
      throw DataError("the data set is empty");
    });
  });
  EXPECT_TRUE(thrown.has("rank 1: the data set is empty")) << thrown.text;
}

TEST(NcclFaults, TwoRanksOnOneDeviceAreRefusedByName) {
  run_ranks(3, [](Rank& rank) {
    const Thrown thrown =
        thrown_by([&] { make_fake_nccl_group(rank.world(), fake_device(rank.id() == 2 ? 0 : rank.id())); });
    EXPECT_EQ(thrown.code, ErrorCode::kConfig);
    EXPECT_TRUE(thrown.has("ranks 0 and 2 of group 'world.fake:")) << thrown.text;
    EXPECT_TRUE(thrown.has("cuda_ipc")) << thrown.text;
  });
}

TEST(NcclFaults, ItWorksOverRanksThatShareNoMemoryAndTimesOut) {
  std::atomic<bool> has_ended{false};
  run_ranks(2,
            [&](Rank& rank) {
              const auto device = fake_device(rank.id());
              const auto group = make_fake_nccl_group(rank.world(), device);
              DeviceRank device_rank(rank, *group, device);
              const at::Tensor tensor = at::ones({9}, device_rank.on_device());
              group->all_reduce(tensor).wait();
              EXPECT_TRUE(tensor.cpu().equal(at::full({9}, 2.0)));
              if (rank.id() == 1) {
                while (!has_ended) std::this_thread::sleep_for(1ms);
                return;
              }
              const auto pending = group->all_reduce(tensor);
              Thrown thrown;
              for (int tries = 0; tries < 1000 && thrown.text == Thrown{}.text; ++tries) {
                std::this_thread::sleep_for(10ms);
                thrown = thrown_by([&] { group->barrier(); });
              }
              has_ended = true;
              EXPECT_EQ(thrown.code, ErrorCode::kTimeout) << thrown.text;
            },
            {.backend = RankBackend::kC10d, .timeout = 600ms});
}

TEST(NcclFaults, AHostOrAFakeGroupIsNoPlaceForIt) {
  const auto host = [] { return std::move(make_thread_groups(1).front()); };
  EXPECT_EQ(thrown_by([&] { make_nccl_group(host(), c10::Device(c10::kCPU)); }).code, ErrorCode::kConfig);
  EXPECT_EQ(thrown_by([&] { make_cuda_ipc_group(host(), c10::Device(c10::kCPU)); }).code, ErrorCode::kConfig);
  EXPECT_EQ(thrown_by([&] { make_fake_nccl_group(make_fake_group(0, 2), fake_device()); }).code, ErrorCode::kConfig);
  EXPECT_EQ(thrown_by([&] { make_fake_nccl_group(nullptr, fake_device()); }).code, ErrorCode::kConfig);
}

TEST(NcclLibrary, IsFoundBesideTorchAndNewEnough) {
  int version = 0;
  ASSERT_EQ(comm::load_nccl().get_version(&version), comm::ncclSuccess);
  EXPECT_GE(version, 21803);
}

TEST(CudaIpcFaults, WithoutADriverItSaysWhatIsMissing) {
  if (::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) != nullptr) GTEST_SKIP() << "there is a driver";
  const Thrown thrown =
      thrown_by([] { make_cuda_ipc_group(std::move(make_thread_groups(1).front()), c10::Device(c10::kCUDA, 0)); });
  EXPECT_TRUE(thrown.has("libcuda.so.1") || thrown.code == ErrorCode::kUnsupported) << thrown.text;
}

TEST(CudaIpcFaults, RanksThatShareNoMemoryAreRefused) {
  run_ranks(2,
            [](Rank& rank) {
              const Thrown thrown = thrown_by([&] { make_fake_cuda_ipc_group(rank.world(), fake_device(rank.id())); });
              EXPECT_EQ(thrown.code, ErrorCode::kConfig);
              EXPECT_TRUE(thrown.has("share none")) << thrown.text;
            },
            {.backend = RankBackend::kC10d});
}

TEST(CudaIpcFaults, ADeviceThatCannotIsAConfigErrorOnEveryRank) {
  const auto refused = [](FakeCudaFault fault, const char* text) {
    set_fake_cuda_fault(fault);
    run_ranks(2, [&](Rank& rank) {
      const Thrown thrown = thrown_by([&] { make_fake_cuda_ipc_group(rank.world(), fake_device(rank.id())); });
      EXPECT_EQ(thrown.code, ErrorCode::kConfig) << thrown.text;
      EXPECT_TRUE(thrown.has(text)) << thrown.text;
    });
    set_fake_cuda_fault(FakeCudaFault::kNothing);
  };
  refused(FakeCudaFault::kNoPeerAccess, "peer access");
  refused(FakeCudaFault::kNoMemory, "cannot share GPU memory");
  refused(FakeCudaFault::kNoStreamMemoryOperations, "the streams of this GPU cannot wait for memory");
  EXPECT_EQ(fake_cuda_allocations(), 0);
}

TEST(CudaIpcFaults, SlotsThatAreTooSmallAreRefused) {
  run_ranks(2, [](Rank& rank) {
    const Thrown thrown =
        thrown_by([&] { make_fake_cuda_ipc_group(rank.world(), fake_device(rank.id()), {.slot_bytes = 5000}); });
    EXPECT_EQ(thrown.code, ErrorCode::kConfig);
    EXPECT_TRUE(thrown.has("slot_bytes=5000")) << thrown.text;
  });
}

TRIREME_ON_EVERY_TRANSPORT(DeviceFaults);

}  // namespace
}  // namespace trireme
