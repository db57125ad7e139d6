// The pager's events, one at a time: what would race on a device if it were left out.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/device/stream.h"
#include "trireme/pager/pager.h"

namespace trireme::on_devices {
namespace {

using namespace testing;

constexpr int64_t kNumel = 64;

/// Parameters, a unit each, at ZeRO stage 3 over two devices.
void with_pager(const std::function<void(Rank&, Pager&, std::vector<at::Tensor>&)>& body, int count = 2,
                PagerPolicy policy = {}) {
  policy.stage = 3;
  policy.units.merge_below_bytes = 0;
  run_ranks(2, [&](Rank& rank) {
    const auto group = make_fake_nccl_group(rank.world(), fake_device(rank.id()));
    const at::TensorOptions options = at::TensorOptions().device(fake_device(rank.id()));
    std::vector<at::Tensor> parameters;
    std::vector<NamedParameter> named;
    for (int i = 0; i < count; ++i) {
      parameters.push_back(at::full({kNumel}, i + 1.0, options).requires_grad_());
      named.push_back({std::to_string(i) + ".weight", parameters.back()});
    }
    Pager pager(*group, named, policy);
    body(rank, pager, parameters);
  });
}

ClosedWindow closed_window(Pager& pager) {
  ClosedWindow window = pager.close_window();
  window.meet();
  return window;
}

/// An optimizer's update, in one line.
void update(Pager& pager, double value) {
  const at::NoGradGuard no_grad;
  ClosedWindow window = closed_window(pager);
  for (const OwnedSlice& slice : pager.owned()) {
    at::Tensor(slice.weights).fill_(value);
    window.publish(slice.unit);
  }
  window.open();
}

TEST(PagerOnDevices, AGatherStartsBehindTheUpdateOfItsShard) {
  FakeRecord record;
  with_pager([](Rank&, Pager& pager, std::vector<at::Tensor>& parameters) {
    for (const at::Tensor& parameter : parameters) (void)parameter.sum();
    // Idle buffers are free since before the update, so that they alone would let a gather start too early.
    ClosedWindow window = closed_window(pager);
    for (int unit = 0; unit < 2; ++unit) window.publish(unit);
    window.open();
    update(pager, 5);
    for (const at::Tensor& parameter : parameters) EXPECT_EQ(parameter.sum().item<float>(), 5 * kNumel);
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(PagerOnDevices, AnotherStreamMayReadWhatIsGathered) {
  FakeRecord record;
  with_pager([](Rank& rank, Pager& pager, std::vector<at::Tensor>& parameters) {
    const SideStream side(fake_device(rank.id()));
    (void)parameters[0].sum();
    {
      const OnStream on(side);
      (void)parameters[0].sum();
    }
    ClosedWindow window = closed_window(pager);
    window.publish(0);  // its buffer serves the other unit, behind both streams
    EXPECT_EQ(parameters[1].sum().item<float>(), 2 * kNumel);
    window.abandon();
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(PagerOnDevices, AGatherStartsBehindTheUsersWrite) {
  FakeRecord record;
  with_pager([](Rank&, Pager& pager, std::vector<at::Tensor>& parameters) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters) (void)parameter.sum();
    ClosedWindow window = closed_window(pager);
    window.publish(1);  // leaves a buffer that is free since before the write
    parameters[0].fill_(7);
    window.publish(0);
    EXPECT_EQ(parameters[0].sum().item<float>(), 7 * kNumel);
    window.open();
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

// The purpose of the gathers' stream: gathers do not wait for what was enqueued before and has nothing to do with them.
// (A buffer's first gather does: its memory comes from the stream that computes.)
TEST(PagerOnDevices, AGatherWaitsForNothingThatComputesElsewhere) {
  FakeRecord record;
  with_pager([](Rank& rank, Pager& pager, std::vector<at::Tensor>& parameters) {
    for (const at::Tensor& parameter : parameters) (void)parameter.sum();
    update(pager, 5);
    at::Tensor other = at::ones({kNumel}, at::TensorOptions().device(fake_device(rank.id())));
    (void)other.exp();
    for (const at::Tensor& parameter : parameters) (void)parameter.sum();
  });
  for (int device = 0; device < 2; ++device) {
    std::vector<FakeOperation> elsewhere, sums, gathers;
    for (const FakeOperation& operation : record.operations()) {
      if (operation.device != device) continue;
      if (operation.name == "aten::exp") elsewhere.push_back(operation);
      if (operation.name == "aten::sum") sums.push_back(operation);
      if (operation.name == "nccl") gathers.push_back(operation);
    }
    ASSERT_EQ(elsewhere.size(), 1u);
    ASSERT_GE(gathers.size(), 4u);
    EXPECT_TRUE(runs_after(sums.back(), gathers.back()));
    for (const FakeOperation& gather : gathers) EXPECT_FALSE(runs_after(gather, elsewhere[0])) << "device " << device;
  }
}

TEST(PagerOnDevices, ReleasedMemoryIsThatOfTheShards) {
  FakeRecord record;
  with_pager([&](Rank& rank, Pager& pager, std::vector<at::Tensor>& parameters) {
    (void)parameters[0].sum();
    pager.release_gathered();
    rank.world().barrier();
    // Per unit half of the weights, and of the gradients' sums.
    if (rank.id() == 0) {
      EXPECT_EQ(record.bytes(0), int64_t{2 * 2 * kNumel / 2 * 4});
    }
    rank.world().barrier();
  });
}

TEST(PagerOnDevices, SharedGathersAreRefused) {
  FakeRecord record;
  PagerPolicy policy;
  policy.gather = GatherPolicy::kShared;
  const std::string text =
      error_of<Error>([&] { with_pager([](Rank&, Pager&, std::vector<at::Tensor>&) {}, 2, policy); });
  EXPECT_SAYS(text, "trireme.gather: \"shared\" is for parameters on the host");
}

TEST(PagerOnDevices, ParametersOnTwoDevicesAreNamed) {
  FakeRecord record;
  const std::string text = error_of<Error>([&] {
    run_ranks(1, [](Rank& rank) {
      Pager pager(rank.world(),
                  {{"a", at::ones({4}).requires_grad_()},
                   {"b", at::ones({4}, at::TensorOptions().device(fake_device())).requires_grad_()}},
                  {});
    });
  });
  EXPECT_SAYS(text, "parameter 'b' is on fake:0 and 'a' on cpu");
}

}  // namespace
}  // namespace trireme::on_devices
