// Memory that NCCL moves in place: what it is, and that it outlives groups and failures.
#include <optional>
#include <thread>

#include "tests/comm/device_cases.h"
#include "tests/comm/thrown.h"
#include "tests/support/becomes_true.h"
#include "tests/support/registered_zeros.h"
#include "trireme/base/error.h"

// Without the headers of NCCL and CUDA there are no such groups to test.
namespace trireme {
namespace {

using namespace testing;

at::Tensor registered_zeros(const DeviceRank& rank, int64_t bytes) {
  return testing::registered_zeros(rank.group(), rank.device(), bytes);
}

class DeviceMemory : public OnEveryTransport {};

TEST_P(DeviceMemory, ThatIsRegisteredIsZerosWhichCollectivesMove) {
  run(2, [](DeviceRank& rank) {
    const at::Tensor slab = registered_zeros(rank, 4096);
    EXPECT_EQ(slab.device(), rank.device());
    EXPECT_EQ(slab.scalar_type(), at::kByte);
    EXPECT_TRUE(slab.cpu().equal(at::zeros({4096}, at::kByte)));
    const at::Tensor whole = slab.narrow(0, 1024, 2400).view(at::kFloat);
    const at::Tensor own = whole.narrow(0, 300 * rank.id(), 300);
    own.fill_(rank.id() + 1);
    rank.group().all_gather(whole, own).wait();
    EXPECT_TRUE(whole.cpu().equal(at::cat({at::full({300}, 1.0), at::full({300}, 2.0)})));
    rank.group().all_reduce(whole).wait();
    EXPECT_TRUE(whole.cpu().equal(at::cat({at::full({300}, 2.0), at::full({300}, 4.0)})));
  });
  EXPECT_EQ(fake_nccl_memory().registrations, 0);
}

TEST_P(DeviceMemory, OfTheHostIsNotRegistered) {
  run(2, [](DeviceRank& rank) {
    EXPECT_EQ(rank.group().buffer_registration(at::kCPU), nullptr);
    EXPECT_EQ(rank.host().buffer_registration(at::kCPU), nullptr);
  });
}

TRIREME_ON_EVERY_TRANSPORT(DeviceMemory);

/// Ranks with a group over NCCL, after which nothing is registered or allocated, and nothing has raced.
class NcclMemory : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(fake_nccl_memory().registrations, 0);
    for (int device = 0; device < 2; ++device) EXPECT_EQ(record_.bytes(device), bytes_[device]) << device;
    if (fails_) return;
    EXPECT_EQ(record_.races(), std::vector<std::string>());
  }
  void run(const std::function<void(DeviceRank&)>& body) const {
    run_device_ranks(DeviceTransportKind::kNccl, 2, body);
  }
  FakeRecord record_;
  bool fails_ = false;

  const std::vector<int64_t> bytes_{record_.bytes(0), record_.bytes(1)};
};

TEST_F(NcclMemory, IsMovedInPlaceByTheGroupThatHasRegisteredIt) {
  const FakeNcclMemory before = fake_nccl_memory();
  run([&](DeviceRank& rank) {
    const auto other = rank.group().split({{0, 1}}, "other");
    const at::Tensor slab = registered_zeros(rank, 1024).view(at::kFloat);
    const at::Tensor own = slab.narrow(0, 128 * rank.id(), 128);
    rank.group().all_gather(slab, own).wait();
    rank.group().reduce_scatter(own, slab).wait();
    rank.group().all_reduce(slab).wait();
    rank.host().barrier();
    EXPECT_EQ(fake_nccl_memory().moved_in_place - before.moved_in_place, 2 * 3);
    EXPECT_EQ(fake_nccl_memory().copied, before.copied);
    rank.host().barrier();
    other->all_gather(slab, own).wait();                   // is registered elsewhere
    rank.group().all_gather(slab, own.clone()).wait();     // comes from elsewhere
    rank.group().all_reduce(slab, ReduceOp::kMax).wait();  // is folded here, since NCCL drops NaNs
    auto sent = rank.group().send(slab, 1 - rank.id());
    rank.group().recv(at::empty_like(slab), 1 - rank.id()).wait();
    sent.wait();
    Event::record(rank.device())
        .synchronize();  // a close that the group's own watch has seen to tells the record nothing
    rank.host().barrier();
    EXPECT_EQ(fake_nccl_memory().moved_in_place - before.moved_in_place, 2 * 3);
    EXPECT_GE(fake_nccl_memory().copied - before.copied, 2 * 2);
    EXPECT_EQ(fake_nccl_memory().registrations, 2);
    EXPECT_NE(line_of(rank.group().flight_record(), "all_reduce #3").find("registered"), std::string::npos);
    rank.host().barrier();
  });
}

TEST_F(NcclMemory, MayBeGatheredTogetherWithOther) {
  run([](DeviceRank& rank) {
    const at::Tensor slab = registered_zeros(rank, 1024).view(at::kFloat);
    const at::Tensor plain = at::zeros_like(slab);
    const auto own = [&](const at::Tensor& whole) { return whole.narrow(0, 128 * rank.id(), 128); };
    for (const at::Tensor& whole : {slab, plain}) own(whole).fill_(rank.id() + 1);
    for (Pending<void>& pending : rank.group().all_gather_coalesced({slab, plain}, {own(slab), own(plain)}))
      pending.wait();
    for (const at::Tensor& whole : {slab, plain})
      EXPECT_TRUE(whole.cpu().equal(at::cat({at::full({128}, 1.0), at::full({128}, 2.0)})));
  });
}

TEST_F(NcclMemory, AndOtherMemoryAreDifferentCalls) {
  fails_ = true;
  run([](DeviceRank& rank) {
    const at::Tensor slab = registered_zeros(rank, 1024).view(at::kFloat);
    const at::Tensor tensor = rank.id() == 0 ? slab : at::zeros_like(slab);
    const Thrown thrown = thrown_by([&] {
      auto pending = rank.group().all_reduce(tensor);
      EXPECT_TRUE(becomes_true([&] { return pending.done(); }));
      pending.wait();
    });
    EXPECT_EQ(thrown.code, ErrorCode::kDiverged) << thrown.text;
    EXPECT_TRUE(thrown.has("sum, registered)")) << thrown.text;
  });
}

TEST_F(NcclMemory, OutlivesItsGroup) {
  std::vector<at::Tensor> kept(2);
  run([&](DeviceRank& rank) {
    kept[rank.id()] = registered_zeros(rank, 512);
    kept[rank.id()].fill_(rank.id() + 1);
    Event::record(rank.device()).synchronize();
  });
  EXPECT_EQ(fake_nccl_memory().registrations, 0);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(kept[rank].cpu().equal(at::full({512}, rank + 1, at::kByte)));
    EXPECT_EQ(record_.bytes(rank), bytes_[rank] + 512);
  }
}

// By the next call after all was dropped: whoever drops a tensor waits for nothing.
TEST_F(NcclMemory, IsFreedWhenTheDeviceIsThroughWithAllOfIt) {
  run([&](DeviceRank& rank) {
    const auto in_all = [&] { return fake_nccl_memory().registrations; };
    std::optional<at::Tensor> slab = registered_zeros(rank, 512);
    std::optional<at::Tensor> other = registered_zeros(rank, 512);
    const SideStream side(rank.device());
    {
      const Event made = Event::record(rank.device());
      const OnStream on(side);
      made.stream_wait();
      slab->fill_(3);  // nothing is behind it
    }
    const int64_t waits = record_.host_waits(std::this_thread::get_id()), bytes = record_.bytes(rank.id());
    slab.reset();
    rank.host().barrier();
    std::optional<at::Tensor> third = registered_zeros(rank, 512);
    rank.host().barrier();
    EXPECT_EQ(in_all(), 2 * 3);
    EXPECT_EQ(record_.bytes(rank.id()), bytes + 512);
    rank.host().barrier();
    other.reset();
    if (rank.id() == 0) third.reset();
    rank.host().barrier();
    EXPECT_EQ(record_.host_waits(std::this_thread::get_id()), waits);
    const at::Tensor fourth = registered_zeros(rank, 512);  // the other rank still has one
    rank.host().barrier();
    EXPECT_EQ(in_all(), 2 * 4);
    rank.host().barrier();
  });
  run([&](DeviceRank& rank) {
    const int64_t before = record_.bytes(rank.id());
    for (int turn = 0; turn < 3; ++turn) {
      const at::Tensor slab = registered_zeros(rank, 512);
      EXPECT_EQ(record_.bytes(rank.id()), before + 512) << turn;
      const at::Tensor whole = slab.view(at::kFloat);
      rank.group().all_reduce(whole).wait();
    }
  });
}

TEST_F(NcclMemory, OutlivesAGroupThatFails) {
  fails_ = true;
  run([&](DeviceRank& rank) {
    const at::Tensor slab = registered_zeros(rank, 512);
    if (rank.id() == 0) rank.group().abort("for a test");
    EXPECT_TRUE(becomes_true([&] {
      try {
        rank.group().all_reduce(slab).wait();
      } catch (const CommError&) {
        return true;
      }
      return false;
    }));
    const Thrown thrown = thrown_by([&] { (void)registered_zeros(rank, 512); });
    EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
    EXPECT_TRUE(thrown.has("for a test")) << thrown.text;
  });
}

TEST_F(NcclMemory, ThatIsNotThereIsToldWithItsSizeAndAWayOut) {
  limit_fake_nccl_memory(1000);
  run([](DeviceRank& rank) {
    const Thrown thrown = thrown_by([&] { (void)registered_zeros(rank, 4096); });
    EXPECT_TRUE(thrown.has("4096 bytes")) << thrown.text;
    EXPECT_TRUE(thrown.has(rank.device().str())) << thrown.text;
    EXPECT_TRUE(thrown.has("trireme.register_buffers")) << thrown.text;
    EXPECT_EQ(registered_zeros(rank, 1000).numel(), 1000);  // the group goes on
  });
  limit_fake_nccl_memory(SIZE_MAX);
}

TEST_F(NcclMemory, NeedsAnNcclThatCanRegister) {
  let_fake_nccl_register(false);
  run([](DeviceRank& rank) {
    const Thrown thrown = thrown_by([&] { (void)registered_zeros(rank, 512); });
    EXPECT_EQ(thrown.code, ErrorCode::kUnsupported);
    EXPECT_TRUE(thrown.has("trireme.register_buffers")) << thrown.text;
    EXPECT_TRUE(thrown.has("2.19")) << thrown.text;
  });
  let_fake_nccl_register(true);
}

}  // namespace
}  // namespace trireme
