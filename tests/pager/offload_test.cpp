// Data that the pager keeps on the host for parameters on a device, piece by piece.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/device/pinned_arena.h"
#include "trireme/device/stream.h"
#include "trireme/pager/pager.h"

namespace trireme::on_devices {
namespace {

using namespace testing;

constexpr int64_t kOffloadNumel = 64;

/// `count` parameters, a unit each, on one device.
void with_offload(const std::function<void(Pager&, std::vector<at::Tensor>&)>& body, double ratio = 1,
                  bool parameters = false, int count = 2) {
  PagerPolicy policy;
  policy.stage = 3;
  policy.units.merge_below_bytes = 0;
  policy.offload_ratio = ratio;
  policy.offload_parameters = parameters;
  run_ranks(1, [&](Rank& rank) {
    const at::TensorOptions options = at::TensorOptions().device(fake_device());
    std::vector<at::Tensor> tensors;
    std::vector<NamedParameter> named;
    for (int i = 0; i < count; ++i) {
      tensors.push_back(at::full({kOffloadNumel}, i + 1.0, options).requires_grad_());
      named.push_back({std::to_string(i) + ".weight", tensors.back()});
    }
    Pager pager(rank.world(), named, policy);
    body(pager, tensors);
  });
}

/// Backward of the sum of all parameters times `factor`, and the end of the window.
ClosedWindow backward_of_sums(Pager& pager, const std::vector<at::Tensor>& parameters, double factor) {
  at::Tensor loss;
  for (const at::Tensor& parameter : parameters) loss = loss.defined() ? loss + parameter.sum() : parameter.sum();
  (loss * factor).backward();
  return pager.close_window();
}

class PagerOffload : public ::testing::TestWithParam<bool> {};

TEST_P(PagerOffload, GradientsAndWeightsOfTheHostAreThoseOfTheDevice) {
  FakeRecord record;
  with_offload(
      [](Pager& pager, std::vector<at::Tensor>& parameters) {
        const at::NoGradGuard no_grad;
        for (int step = 0; step < 3; ++step) {
          ClosedWindow window = [&] {
            const at::AutoGradMode with_grad(true);
            return backward_of_sums(pager, parameters, 1 + step);
          }();
          EXPECT_EQ(window.squares_on_device().sum().item<double>(), 2 * kOffloadNumel * (1 + step) * (1 + step));
          window.begin_update();
          for (const OwnedSlice& slice : pager.owned()) {
            ASSERT_TRUE(slice.weights.device().is_cpu() && slice.gradients.device().is_cpu());
            pager.await_owned(slice.unit);
            EXPECT_TRUE(slice.gradients.eq(1 + step).all().item<bool>());
            at::Tensor(slice.weights).sub_(slice.gradients);
            window.publish(slice.unit);
          }
          window.open();
        }
        EXPECT_EQ(parameters[1].sum().item<float>(), (2 - 6) * kOffloadNumel);
      },
      1, GetParam());
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

// One unit each of what is counted, what is not, and both.
TEST(PagerOnDevices, TheNormLeavesOutWhatIsNotCounted) {
  struct Case {
    int stage;
    double offload_ratio;
  };
  for (const Case& which : {Case{0, 0}, Case{1, 0}, Case{2, 0}, Case{3, 0}, Case{2, 1}, Case{3, 1}}) {
    run_ranks(2, [&](Rank& rank) {
      const auto group = make_fake_nccl_group(rank.world(), fake_device(rank.id()));
      const at::TensorOptions options = at::TensorOptions().device(fake_device(rank.id()));
      std::vector<NamedParameter> parameters;
      const auto add = [&](const char* name, bool is_counted) {
        parameters.push_back({.name = name,
                              .tensor = at::full({kOffloadNumel}, 1.0, options).requires_grad_(),
                              .is_counted = is_counted});
      };
      add("0.weight", true);
      add("1.weight", false);
      for (const char* name : {"2.a", "2.c"}) add(name, true);
      for (const char* name : {"2.b", "2.d"}) add(name, false);
      parameters.back().part = {{2 * kOffloadNumel}, 0, {{7, 7 + kOffloadNumel}}};
      parameters.back().counted = {{2 * kOffloadNumel}, 0, {{10, 12}, {kOffloadNumel, kOffloadNumel + 5}}};
      parameters.back().is_counted = true;
      PagerPolicy policy;
      policy.stage = which.stage;
      policy.offload_ratio = which.offload_ratio;
      policy.units.merge_below_bytes = 0;
      Pager pager(*group, parameters, policy);
      std::vector<at::Tensor> tensors;
      for (const NamedParameter& parameter : parameters) tensors.push_back(parameter.tensor);
      ClosedWindow window = backward_of_sums(pager, tensors, 3);
      at::Tensor squares = window.squares_on_device();
      ASSERT_EQ(squares.numel(), 3);
      group->all_reduce(squares).wait();
      EXPECT_NEAR(squares[0].item<double>(), 9.0 * kOffloadNumel, 1e-9) << which.stage << which.offload_ratio;
      EXPECT_EQ(squares[1].item<double>(), 0) << which.stage << which.offload_ratio;
      EXPECT_NEAR(squares[2].item<double>(), 9.0 * (2 * kOffloadNumel + 7), 1e-9) << which.stage << which.offload_ratio;
      window.meet();
      for (const OwnedSlice& slice : pager.owned()) {
        pager.await_owned(slice.unit);
        window.publish(slice.unit);
      }
      window.open();
    });
  }
}

// Nothing but events says that a use after backward is over before the new weights come.
TEST_P(PagerOffload, NewWeightsComeBehindTheLastUseOfTheOld) {
  FakeRecord record;
  with_offload(
      [](Pager& pager, std::vector<at::Tensor>& parameters) {
        for (int step = 0; step < 2; ++step) {
          (parameters[0].sum() + parameters[1].sum()).backward();
          {
            const at::NoGradGuard no_grad;
            for (const at::Tensor& parameter : parameters) (void)parameter.sum();
          }
          ClosedWindow window = pager.close_window();
          window.meet();
          for (const OwnedSlice& slice : pager.owned()) {
            pager.await_owned(slice.unit);
            at::Tensor(slice.weights).fill_(step);
            window.publish(slice.unit);
          }
          window.open();
        }
        const at::NoGradGuard no_grad;
        EXPECT_EQ(parameters[0].sum().item<float>(), kOffloadNumel);
      },
      1, GetParam());
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST_P(PagerOffload, WhatTheUserWritesReachesTheHost) {
  FakeRecord record;
  with_offload(
      [](Pager& pager, std::vector<at::Tensor>& parameters) {
        const at::NoGradGuard no_grad;
        parameters[1].fill_(9);
        (void)pager.settle_writes();
        EXPECT_TRUE(pager.owned()[1].weights.eq(9).all().item<bool>());
        EXPECT_TRUE(pager.owned()[0].weights.eq(1).all().item<bool>());
      },
      1, GetParam());
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST_P(PagerOffload, AUseWaitsForWhatAnotherThreadPublishes) {
  FakeRecord record;
  with_offload(
      [](Pager& pager, std::vector<at::Tensor>& parameters) {
        ClosedWindow window = backward_of_sums(pager, parameters, 1);
        window.meet();
        for (int unit = 0; unit < 2; ++unit) window.defer_publish(unit);
        window.open();
        std::thread other([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(30));
          for (int unit = 1; unit >= 0; --unit) {
            pager.await_owned(unit);
            at::Tensor(pager.owned()[unit].weights).fill_(7);
            pager.publish_deferred(unit);
          }
        });
        const at::NoGradGuard no_grad;
        EXPECT_EQ(parameters[0].sum().item<float>(), 7 * kOffloadNumel);
        EXPECT_EQ(parameters[1].sum().item<float>(), 7 * kOffloadNumel);
        other.join();
      },
      1, GetParam());
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST_P(PagerOffload, WhatWentWrongThereReachesWhoNeedsTheUnit) {
  FakeRecord record;
  with_offload(
      [](Pager& pager, std::vector<at::Tensor>& parameters) {
        ClosedWindow window = backward_of_sums(pager, parameters, 1);
        window.meet();
        for (int unit = 0; unit < 2; ++unit) window.defer_publish(unit);
        window.open();
        pager.publish_deferred(0);
        pager.publish_deferred(1, std::make_exception_ptr(Error(ErrorCode::kIo, "no memory left")));
        for (int again = 0; again < 2; ++again)
          EXPECT_SAYS(error_of<Error>([&] { (void)parameters[1].sum(); }), "no memory left");
        EXPECT_SAYS(error_of<Error>([&] { (void)pager.close_window(); }), "no memory left");
      },
      1, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Weights, PagerOffload, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "OnTheHost" : "OnTheDevice"; });

TEST(PagerOffloads, ARatioLeavesTheFirstUnitsToTheDevice) {
  FakeRecord record;
  for (const auto& [ratio, first] : std::vector<std::pair<double, int>>{{0, 4}, {0.25, 3}, {0.3, 2}, {1, 0}})
    with_offload(
        [&](Pager& pager, std::vector<at::Tensor>&) {
          for (const OwnedSlice& slice : pager.owned())
            EXPECT_EQ(slice.weights.device().is_cpu(), slice.unit >= first) << ratio << ", unit " << slice.unit;
        },
        ratio, false, 4);
}

TEST(PagerOffloads, OnTheHostNothingIsOffloaded) {
  run_ranks(1, [](Rank& rank) {
    PagerPolicy policy;
    policy.stage = 3;
    policy.offload_ratio = 1;
    policy.offload_parameters = true;
    Pager pager(rank.world(), {{"a", at::full({4}, 1.0).requires_grad_()}}, policy);
    EXPECT_EQ(pager.policy().offload_ratio, 0);
    EXPECT_FALSE(pager.policy().offload_parameters);
    EXPECT_EQ(pager.memory().offloaded_bytes, 0);
  });
}

TEST(PinnedArena, TakesWhatItWasToldAndLittleMore) {
  FakeRecord record;
  constexpr int64_t kPieces = 100, kNumel = 3000;  // 12 000 bytes each, which alone would cost 16 384
  PinnedArena arena(kPieces * kNumel * 4, fake_device());
  std::vector<at::Tensor> pieces;
  for (int64_t i = 0; i < kPieces; ++i) {
    pieces.push_back(arena.take(kNumel, at::kFloat));
    pieces.back().fill_(static_cast<double>(i));
  }
  for (int64_t i = 0; i < kPieces; ++i) EXPECT_TRUE(pieces[i].eq(static_cast<double>(i)).all().item<bool>());
  EXPECT_LT(arena.bytes(), kPieces * kNumel * 4 * 11 / 10);
  EXPECT_EQ(arena.take(1 << 20, at::kBFloat16).numel(), 1 << 20);
}

}  // namespace
}  // namespace trireme::on_devices
