// When calls on a device run: behind what the caller had enqueued, beside what it enqueues next, before what it
// enqueues after wait(). And what becomes of memory meanwhile.
#include <thread>

#include "tests/comm/device_cases.h"
#include "tests/support/becomes_true.h"

// Without the headers of NCCL and CUDA there are no such groups to test.
namespace trireme {
namespace {

using namespace testing;
using namespace std::chrono_literals;

class DeviceOrder : public OnEveryTransport {};

/// The operations named `name` on streams of `device`, since the record began.
std::vector<FakeOperation> operations_named(const FakeRecord& record, const std::string& name, c10::Device device) {
  std::vector<FakeOperation> found;
  for (const FakeOperation& operation : record.operations())
    if (operation.name == name && operation.stream / 32 == device.index()) found.push_back(operation);
  return found;
}

/// The name of the operation by which a transport moves data.
std::string data_operation(DeviceTransportKind kind) {
  return kind == DeviceTransportKind::kNccl || kind == DeviceTransportKind::kNcclInRankOrder ? "nccl" : "cuda copy";
}

TEST_P(DeviceOrder, ACallIsBehindWhatWasEnqueuedAndBesideWhatComesNext) {
  run(2, [&](DeviceRank& rank) {
    const at::Tensor whole = at::empty({4096}, rank.on_device());
    const at::Tensor shard = at::empty({2048}, rank.on_device());
    const at::Tensor other = at::empty({16}, rank.on_device());
    shard.fill_(rank.id());
    auto pending = rank.group().all_gather(whole, shard);
    other.add_(1);
    pending.wait();
    other.mul_(2);
    rank.host().barrier();
    const auto fills = operations_named(record(), "aten::fill_", rank.device());
    const auto sums = operations_named(record(), "aten::add", rank.device());
    const auto products = operations_named(record(), "aten::mul", rank.device());
    const auto moves = operations_named(record(), data_operation(GetParam()), rank.device());
    ASSERT_FALSE(fills.empty() || sums.empty() || products.empty() || moves.empty());
    if (GetParam() == DeviceTransportKind::kCudaIpcOnOneDevice) return;  // operations of both ranks are on one device
    EXPECT_TRUE(runs_after(moves.back(), fills.back()));
    EXPECT_FALSE(runs_after(moves.back(), sums.back()));
    EXPECT_FALSE(runs_after(sums.back(), moves.front()));
    EXPECT_TRUE(runs_after(products.back(), moves.back()));
  });
}

TEST_P(DeviceOrder, GathersThatAreCoalescedAreOneLaunchWhereThereIsOne) {
  const size_t before = operations_named(record(), "nccl", fake_device(0)).size();
  run(2, [&](DeviceRank& rank) {
    std::vector<at::Tensor> wholes, shards;
    for (const int64_t numel : {600, 0, 7, 4096}) {  // 7 is no multiple of 2
      wholes.push_back(at::zeros({numel}, rank.on_device()));
      const ShardRange own = shard_range(numel, 2, rank.id());
      shards.push_back(at::full({own.numel()}, rank.id() + numel, rank.on_device()));
    }
    rank.host().barrier();
    auto pending = rank.group().all_gather_coalesced(wholes, shards);
    ASSERT_EQ(pending.size(), 4);
    for (size_t i = 0; i < wholes.size(); ++i) {
      pending[i].wait();
      const int64_t numel = wholes[i].numel(), first = shard_range(numel, 2, 0).numel();
      const at::Tensor expected = at::full({numel}, static_cast<double>(numel));
      expected.slice(0, first).add_(1);
      EXPECT_TRUE(wholes[i].cpu().equal(expected)) << numel;
    }
    EXPECT_NE(line_of(rank.group().flight_record(), "all_gather #3"), "");  // each has its number
    rank.host().barrier();
  });
  if (data_operation(GetParam()) == "nccl") {
    EXPECT_EQ(operations_named(record(), "nccl", fake_device(0)).size() - before, 1);
  }
}

TEST_P(DeviceOrder, CoalescedGathersAreInputsAndOutputs) {
  run(2, [&](DeviceRank& rank) {
    EXPECT_THROW((void)rank.group().all_gather_coalesced({at::zeros({2}, rank.on_device())}, {}), ShapeError);
  });
}

TEST_P(DeviceOrder, AResultThatIsUsedWithoutWaitIsARace) {
  let_race();
  run(2, [](DeviceRank& rank) {
    const at::Tensor tensor = at::ones({300}, rank.on_device());
    const auto pending = rank.group().all_reduce(tensor);
    tensor.add_(1);
  });
  EXPECT_FALSE(record().races().empty());
}

TEST_P(DeviceOrder, TheStreamThatIsCurrentCounts) {
  run(2, [](DeviceRank& rank) {
    const at::Tensor tensor = at::zeros({300}, rank.on_device());
    const Event made = Event::record(rank.device());
    const SideStream writer(rank.device());
    const SideStream reader(rank.device());
    Pending<void> pending;
    {
      const OnStream on(writer);
      made.stream_wait();
      tensor.add_(1);
      pending = rank.group().all_reduce(tensor);
    }
    const OnStream on(reader);
    pending.wait();
    EXPECT_TRUE(tensor.mul(1).cpu().equal(at::full({300}, 2.0)));
  });
}

TEST_P(DeviceOrder, WhatAutogradAndAutocastSeeIsNotTheGroupsBusiness) {
  run(2, [](DeviceRank& rank) {
    const at::Tensor leaf = at::ones({300}, rank.on_device()).requires_grad_();
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) rank.group().all_reduce(leaf, op).wait();
    EXPECT_TRUE(leaf.is_leaf());
    EXPECT_TRUE(leaf.detach().cpu().equal(at::full({300}, 2.0)));
  });
}

TEST_P(DeviceOrder, ACallThatIsDroppedIsCompleteAllTheSame) {
  run(2, [](DeviceRank& rank) {
    const at::Tensor tensor = at::ones({300}, rank.on_device());
    { const auto dropped = rank.group().all_reduce(tensor); }
    const at::Tensor other = at::ones({3}, rank.on_device());
    rank.group().all_reduce(other).wait();  // comes later on the stream of the group
    EXPECT_TRUE(tensor.cpu().equal(at::full({300}, 2.0)));
  });
}

/// A fake call of cuda_ipc blocks until its peers have made theirs: what is between a call and its end shows with NCCL.
constexpr auto kNccl = DeviceTransportKind::kNccl;

TEST(DeviceCalls, DoNotBlockAndAreDoneWhenThePeersHaveCalled) {
  FakeRecord record;
  run_device_ranks(kNccl, 2, [&](DeviceRank& rank) {
    const at::Tensor tensor = at::ones({300}, rank.on_device());
    if (rank.id() == 1) rank.host().barrier();
    auto pending = rank.group().all_reduce(tensor);
    if (rank.id() == 0) {
      EXPECT_FALSE(pending.done());
      rank.host().barrier();
    }
    EXPECT_TRUE(becomes_true([&] { return pending.done(); }));
    EXPECT_EQ(record.host_waits(), 0);
    rank.host().barrier();
    pending.wait();
    EXPECT_TRUE(tensor.cpu().equal(at::full({300}, 2.0)));
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(DeviceCalls, WaitDoesNotBlockEither) {
  FakeRecord record;
  run_device_ranks(kNccl, 2, [&](DeviceRank& rank) {
    const at::Tensor tensor = at::ones({300}, rank.on_device());
    if (rank.id() == 1) rank.host().barrier();
    rank.group().all_reduce(tensor).wait();
    if (rank.id() == 0) rank.host().barrier();
    EXPECT_EQ(record.recorded_streams(), 0);
    EXPECT_TRUE(tensor.cpu().equal(at::full({300}, 2.0)));
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(DeviceCalls, HoldTheirTensorsUntilTheyAreOver) {
  FakeRecord record;
  run_device_ranks(kNccl, 2, [&](DeviceRank& rank) {
    if (rank.id() == 1) rank.host().barrier();
    const int64_t before = record.bytes(0);
    { const auto dropped = rank.group().all_reduce(at::ones({1000}, rank.on_device())); }
    if (rank.id() == 0) {
      EXPECT_EQ(record.bytes(0), before + 4000);
      rank.host().barrier();
      // It is seen to be over, and let go by the next call.
      EXPECT_TRUE(becomes_true([&] {
        return line_of(rank.group().flight_record(), "all_reduce #1 (numel 1000").find(", took ") != std::string::npos;
      }));
    }
    rank.group().all_reduce(at::empty({0}, rank.on_device())).wait();
    if (rank.id() == 0) {
      EXPECT_EQ(record.bytes(0), before);
    }
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(DeviceCalls, LetGoOfTheirTensorsAtWait) {
  FakeRecord record;
  run_device_ranks(kNccl, 2, [&](DeviceRank& rank) {
    const int64_t before = record.bytes(rank.id());
    auto pending = rank.group().all_reduce(at::ones({1000}, rank.on_device()));
    EXPECT_EQ(record.bytes(rank.id()), before + 4000);
    pending.wait();
    EXPECT_EQ(record.bytes(rank.id()), before);
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(DeviceCalls, MayOutliveTheirGroup) {
  FakeRecord record;
  run_ranks(2, [](Rank& rank) {
    const auto device = fake_device(rank.id());
    const at::Tensor tensor = at::ones({300}, at::TensorOptions().device(device));
    Pending<void> pending;
    {
      const auto group = make_fake_nccl_group(rank.world(), device);
      pending = group->all_reduce(tensor);
    }
    EXPECT_TRUE(pending.done());
    pending.wait();
    EXPECT_TRUE(tensor.cpu().equal(at::full({300}, 2.0)));
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(DeviceMemory, ThatRanksShareIsFreedWhenAllHaveClosedIt) {
  FakeRecord record;
  for (int round = 0; round < 3; ++round)
    run_device_ranks(DeviceTransportKind::kCudaIpc, 3, [](DeviceRank& rank) {
      const at::Tensor tensor = at::ones({30000}, rank.on_device());
      rank.group().all_reduce(tensor).wait();
      if (rank.id() == 1) std::this_thread::sleep_for(20ms);
    });
  EXPECT_EQ(fake_cuda_allocations(), 0);
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(FakeJoints, RunBehindWhatTheirStreamsWaitFor) {
  FakeRecord record;
  const auto stream = [](int device) { return c10::Stream(c10::Stream::DEFAULT, fake_device(device)); };
  const auto early = std::make_shared<FakeJoint>("early", 2);
  const auto late = std::make_shared<FakeJoint>("late", 2);
  std::vector<std::string> ran;
  FakeJoint::enqueue(early, {stream(0), {}, {}}, [&] { ran.push_back("early"); });
  FakeJoint::enqueue(late, {stream(0), {}, {}}, [&] { ran.push_back("late"); });
  FakeJoint::enqueue(late, {stream(1), {}, {}}, [&] { ran.push_back("late"); });
  EXPECT_TRUE(ran.empty());
  FakeJoint::enqueue(early, {stream(2), {}, {}}, [&] { ran.push_back("early"); });
  EXPECT_EQ(ran, (std::vector<std::string>{"early", "late"}));
}

TEST(FakeJoints, LetGoOfAPartThatIsReleased) {
  FakeRecord record;
  at::Tensor values = at::zeros({4}, at::TensorOptions().device(fake_device()));
  const auto joint = std::make_shared<FakeJoint>("exchange", 2);
  bool ran = false;
  FakeJoint::enqueue(joint, {current_stream(fake_device()), {}, {{values.data_ptr(), 16}}}, [&] { ran = true; });
  FakeJoint::release(joint, fake_device());
  values.add_(1);
  FakeJoint::enqueue(joint, {c10::Stream(c10::Stream::DEFAULT, fake_device(1)), {}, {}}, [&] { ran = true; });
  EXPECT_FALSE(ran);
  FakeJoint::release(joint, fake_device(1));
}

TRIREME_ON_EVERY_TRANSPORT(DeviceOrder);

}  // namespace
}  // namespace trireme
