// The checker itself: what is in order is let through, what is not is told.
#include "tests/support/fake_device/fake_device.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>

#include "tests/support/models.h"

namespace trireme::testing {
namespace {

const at::TensorOptions kFake = at::TensorOptions().device(fake_device());

c10::Stream new_stream() { return c10::impl::VirtualGuardImpl(fake_device().type()).getNewStream(fake_device()); }
c10::Stream main_stream() { return c10::impl::VirtualGuardImpl(fake_device().type()).getStream(fake_device()); }

TEST(FakeDevice, ComputesWhatTheHostDoes) {
  FakeRecord record;
  TrainedModel on_host = make_mlp(), on_device = make_mlp();
  move_to_fake(*on_device.module, fake_device());
  const at::Tensor input = at::ones({4, 9});
  auto& host = static_cast<MlpImpl&>(*on_host.module);
  auto& device = static_cast<MlpImpl&>(*on_device.module);
  const at::Tensor expected = host.forward(input).square().mean();
  const at::Tensor loss = device.forward(input.to(fake_device())).square().mean();
  expected.backward();
  loss.backward();
  EXPECT_EQ(loss.item<float>(), expected.item<float>());
  for (size_t i = 0; i < host.parameters().size(); ++i)
    EXPECT_TRUE(device.parameters()[i].grad().cpu().equal(host.parameters()[i].grad())) << i;
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(FakeDevice, TellsAReadThatDoesNotWaitForTheWrite) {
  FakeRecord record;
  at::Tensor values = at::zeros({4}, kFake);
  {
    const c10::StreamGuard on(new_stream());
    (void)values.add(1);
  }
  ASSERT_EQ(record.races().size(), 1u);
  EXPECT_NE(record.races()[0].find("reads what aten::zero_"), std::string::npos) << record.races()[0];
}

TEST(FakeDevice, AnEventBringsOrder) {
  FakeRecord record;
  at::Tensor values = at::zeros({4}, kFake);
  c10::Event written(fake_device().type());
  written.record(main_stream());
  const c10::Stream other = new_stream();
  written.block(other);
  {
    const c10::StreamGuard on(other);
    values.add_(1);
  }
  EXPECT_EQ(record.races(), std::vector<std::string>());
  values.add_(1);  // does not wait for the other one
  EXPECT_FALSE(record.races().empty());
}

TEST(FakeDevice, TellsMemoryThatIsFreedWhileAnotherStreamUsesIt) {
  FakeRecord record;
  {
    const at::Tensor values = at::zeros({4}, kFake);
    c10::Event written(fake_device().type());
    written.record(main_stream());
    const c10::Stream other = new_stream();
    written.block(other);
    const c10::StreamGuard on(other);
    (void)values.add(1);
  }
  ASSERT_EQ(record.races().size(), 1u);
  EXPECT_NE(record.races()[0].find("its release"), std::string::npos) << record.races()[0];
}

TEST(FakeDevice, CountsWhatTheHostWaitsFor) {
  FakeRecord record;
  const at::Tensor values = at::zeros({4}, kFake);
  EXPECT_EQ(record.host_waits(), 0);
  (void)values.sum().item<float>();
  EXPECT_EQ(record.host_waits(), 1);
  (void)values.cpu();
  EXPECT_EQ(record.host_waits(), 2);
  (void)at::ones({4}).to(fake_device());
  EXPECT_EQ(record.host_waits(), 3);
}

TEST(FakeDevice, ACopyToPinnedMemoryArrivesWhenTheHostHasWaited) {
  FakeRecord record;
  const at::Tensor values = at::ones({4}, kFake);
  at::Tensor target = at::empty({4}, at::TensorOptions().pinned_memory(true));
  target.copy_(values, /*non_blocking=*/true);
  EXPECT_EQ(record.host_waits(), 0);
  EXPECT_TRUE(target.isnan().all().item<bool>());
  c10::Event copied(fake_device().type());
  copied.record(main_stream());
  copied.synchronize();
  EXPECT_TRUE(target.equal(at::ones({4})));
}

TEST(FakeDevice, TellsPinnedMemoryThatIsWrittenDuringItsCopy) {
  FakeRecord record;
  at::Tensor source = at::empty({4}, at::TensorOptions().pinned_memory(true)).fill_(1);
  at::Tensor target = at::zeros({4}, kFake);
  target.copy_(source, /*non_blocking=*/true);
  source.fill_(2);
  (void)target.sum().item<float>();
  EXPECT_EQ(record.races().size(), 1u);
}

TEST(FakeDevice, AJointRunsWhenAllPartsAreThere) {
  FakeRecord record;
  at::Tensor values = at::zeros({4}, kFake);
  const auto joint = std::make_shared<FakeJoint>("exchange", 2);
  bool ran = false;
  const auto part = [&](int device) {
    return FakePart{c10::Stream(c10::Stream::DEFAULT, fake_device(device)), {}, {{values.data_ptr(), 16}}};
  };
  FakeJoint::enqueue(joint, part(0), [&] { ran = true; });
  EXPECT_FALSE(ran);
  FakeJoint::enqueue(joint, {c10::Stream(c10::Stream::DEFAULT, fake_device(1)), {}, {}}, [&] { ran = true; });
  EXPECT_TRUE(ran);
  EXPECT_TRUE(joint->is_done());
  values.add_(1);
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

}  // namespace
}  // namespace trireme::testing
