#include "pager/gradients/gradient_arena.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/custom_function.h>

#include <thread>

#include "tests/pager/models.h"
#include "tests/pager/training.h"

namespace trireme {
namespace {

using namespace testing;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kNumel = 64 << 10;  // of fp32: 256 KiB
constexpr size_t kBytes = kNumel * sizeof(float);

std::shared_ptr<GradientArena> make_arena(size_t capacity) {
  void* data = ::mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::shared_ptr<void> memory(data, [capacity](void* mapped) { ::munmap(mapped, capacity); });
  auto arena = std::make_shared<GradientArena>(static_cast<std::byte*>(data), capacity, std::move(memory));
  arena->serve(kBytes);
  return arena;
}

// Runs `act` inside of a backward pass.
struct InBackward : torch::autograd::Function<InBackward> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const std::function<void()>* act) {
    context->saved_data["act"] = reinterpret_cast<int64_t>(act);
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    (*reinterpret_cast<const std::function<void()>*>(context->saved_data["act"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};
void in_backward(const std::function<void()>& act) {
  InBackward::apply(at::ones({1}).requires_grad_(), &act).sum().backward();
}

TEST(GradientArena, ServesAllocationsOfTheServedSizeInBackwardOnly) {
  const auto arena = make_arena(4 * kBytes);
  ArenaScope scope(arena);
  EXPECT_FALSE(arena->contains(at::empty({kNumel}).data_ptr(), kBytes));
  in_backward([&] {
    const at::Tensor served = at::empty({kNumel});
    EXPECT_TRUE(arena->contains(served.data_ptr(), kBytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(served.data_ptr()) % 64, 0u);
    EXPECT_FALSE(arena->contains(at::empty({kNumel + 16}).data_ptr(), 1));
  });
}

TEST(GradientArena, PrivateOnesHaveABlockForEachLargeSize) {
  EXPECT_EQ(make_private_arena({16, 1024}), nullptr);
  const auto arena = make_private_arena({kBytes, 16, kBytes, 2 * kBytes});
  ASSERT_NE(arena, nullptr);
  EXPECT_FALSE(arena->serves(16));
  ArenaScope scope(arena);
  in_backward([&] {
    const void* first = nullptr;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor one = at::empty({kNumel}), other = at::empty({2 * kNumel});
      EXPECT_TRUE(arena->contains(one.data_ptr(), kBytes));
      EXPECT_TRUE(arena->contains(other.data_ptr(), 2 * kBytes));
      if (i == 0) first = one.data_ptr();
      EXPECT_EQ(one.data_ptr(), first);
    }
  });
}

TEST(GradientArena, GivesAFreedBlockAgain) {
  const auto arena = make_arena(4 * kBytes);
  ArenaScope scope(arena);
  in_backward([&] {
    void* first = at::empty({kNumel}).data_ptr();
    EXPECT_EQ(at::empty({kNumel}).data_ptr(), first);
  });
}

TEST(GradientArena, ThatIsFullLeavesAllocationsToLibtorch) {
  const auto arena = make_arena(2 * kBytes);
  ArenaScope scope(arena);
  in_backward([&] {
    const at::Tensor a = at::empty({kNumel}), b = at::empty({kNumel}), c = at::empty({kNumel});
    EXPECT_TRUE(arena->contains(b.data_ptr(), kBytes));
    EXPECT_FALSE(arena->contains(c.data_ptr(), 1));
  });
}

TEST(GradientArena, OutlivesItsOwnerUntilItsLastBlockIsFreed) {
  auto arena = make_arena(2 * kBytes);
  std::weak_ptr<GradientArena> alive = arena;
  at::Tensor kept;
  {
    ArenaScope scope(arena);
    in_backward([&] { kept = at::ones({kNumel}); });
    EXPECT_TRUE(arena->contains(kept.data_ptr(), kBytes));
    arena.reset();
  }
  EXPECT_FALSE(alive.expired());
  EXPECT_EQ(kept.sum().item<float>(), kNumel);
  std::thread([&] { kept.reset(); }).join();
  EXPECT_TRUE(alive.expired());
}

TEST(GradientArena, OfAnIdleOwnerGoesWithIt) {
  auto arena = make_arena(2 * kBytes);
  std::weak_ptr<GradientArena> alive = arena;
  {
    ArenaScope scope(arena);
    in_backward([&] { at::empty({kNumel}); });
    arena.reset();
  }
  EXPECT_TRUE(alive.expired());
}

TEST(GradientArena, ServesTwoOwnersOfOneThreadInTurn) {
  const auto first = make_arena(kBytes), second = make_arena(kBytes);
  ArenaScope first_scope(first);
  {
    ArenaScope second_scope(second);
    in_backward([&] {
      const at::Tensor a = at::empty({kNumel}), b = at::empty({kNumel}), c = at::empty({kNumel});
      EXPECT_TRUE(first->contains(a.data_ptr(), kBytes));
      EXPECT_TRUE(second->contains(b.data_ptr(), kBytes));
      EXPECT_FALSE(first->contains(c.data_ptr(), 1) || second->contains(c.data_ptr(), 1));
    });
  }
  in_backward([&] {
    const at::Tensor a = at::empty({kNumel}), b = at::empty({kNumel});
    EXPECT_TRUE(first->contains(a.data_ptr(), kBytes));
    EXPECT_FALSE(second->contains(b.data_ptr(), 1));
  });
}

TEST(GradientArena, BlocksAreGivenBackThroughARawPointer) {
  // As a bf16 matrix product does with its scratch memory.
  const auto arena = make_arena(kBytes);
  ArenaScope scope(arena);
  in_backward([&] {
    for (int i = 0; i < 3; ++i) {
      void* data = c10::GetCPUAllocator()->raw_allocate(kBytes);
      EXPECT_TRUE(arena->contains(data, kBytes));
      c10::GetCPUAllocator()->raw_deallocate(data);
    }
    c10::GetCPUAllocator()->raw_deallocate(c10::GetCPUAllocator()->raw_allocate(kBytes + 64));
  });
}

// Large enough for blocks of their own, and more activations of a parameter's size than the arena has room for.
TEST(OneSidedGradients, AreRightWhenActivationsFillTheArena) {
  const PagerPolicy policy{.stage = 3, .gather = GatherPolicy::kShared};
  const Program<Loose> program{
      .make =
          [] {
            return Loose(std::vector<std::vector<int64_t>>{{128, 160}, {160, 128}, {128, 130}});
          },
      .run =
          [](Loose& net, const Turn&) {
            at::Tensor x = at::randn({128, 128}) * 0.1;
            for (int i = 0; i < 20; ++i) x = x.matmul((*net)[0]).tanh().matmul((*net)[1]).tanh();
            x.matmul((*net)[2]).square().mean().backward();
          },
      .steps = 2};
  expect_trains_like_one_process(program, policy);
}

TEST(OneSidedGradients, AreRightWhileTheUsersGraphHoldsEveryBlock) {
  // The user keeps gradients of a parameter's size for good; another parameter's gradient finds no block.
  run_ranks(2, [&](Rank& rank) {
    Loose net(std::vector<std::vector<int64_t>>{{200, 100}, {300, 100}});
    Pager pager(rank.world(), named_parameters_of(*net), {.stage = 3, .gather = GatherPolicy::kShared});
    std::vector<at::Tensor> kept;
    const std::function<void()> keep = [&] {
      for (int i = 0; i < 100; ++i) kept.push_back(at::empty({200, 100}));
    };
    for (int step = 0; step < 2; ++step) {
      const auto before = copies_of(net->weights);
      const at::Tensor x = InBackward::apply(at::ones({1}).requires_grad_(), &keep);
      // The hook runs first: it is the last operator of forward.
      ((*net)[0].sum() + (*net)[1].sum() * 2)
          .mul(InBackward::apply(at::ones({1}).requires_grad_(), &keep))
          .sum()
          .backward();
      pager.end_backward();
      sgd_step(pager, 0.5);
      EXPECT_TRUE(at::equal((*net)[0], before[0] - 0.5));
      EXPECT_TRUE(at::equal((*net)[1], before[1] - 1.0));
    }
    pager.restore();
  });
}

}  // namespace
}  // namespace trireme
