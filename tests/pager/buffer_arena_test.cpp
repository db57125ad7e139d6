// Buffers cut from one registered slab.
#include "pager/storage/buffer_arena.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/support/fake_device/fake_device.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int64_t kPiece = 512;  // bytes

at::TensorOptions bytes_on_device() { return at::TensorOptions().dtype(at::kByte).device(fake_device()); }

class SlabArena : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(record_.races(), std::vector<std::string>()); }

  ArenaBuffer take(int64_t pieces) { return arena_.take(pieces * kPiece, bytes_on_device(), 0); }
  bool is_of_slab(const ArenaBuffer& buffer) const { return buffer.memory().is_alias_of(slab_); }
  /// In pieces from the slab's begin.
  int64_t begin(const ArenaBuffer& buffer) const {
    return buffer.memory().storage_offset() * buffer.memory().element_size() / kPiece;
  }

  FakeRecord record_;
  const at::Tensor slab_ = at::zeros({8 * kPiece}, bytes_on_device());
  BufferArena arena_{slab_};
};

TEST_F(SlabArena, CutsBuffersOfAnyDtypeLargeOnesFromTheFrontAndSmallOnesFromTheBack) {
  const ArenaBuffer small = arena_.take(3, bytes_on_device().dtype(at::kFloat), 0);
  const ArenaBuffer large = arena_.take(kPiece, bytes_on_device().dtype(at::kBFloat16), 0);
  EXPECT_EQ(small.memory().numel(), 3);
  EXPECT_EQ(small.memory().scalar_type(), at::kFloat);
  EXPECT_EQ(large.memory().numel(), kPiece);
  EXPECT_EQ(large.memory().scalar_type(), at::kBFloat16);
  EXPECT_EQ(begin(small), 7);
  EXPECT_EQ(begin(large), 0);
  const ArenaBuffer another = take(1), rest = take(4);
  EXPECT_EQ(begin(another), 6);
  EXPECT_EQ(begin(rest), 2);
}

TEST_F(SlabArena, JoinsWhatIsGivenBackInAnyOrder) {
  std::vector<int> order{0, 1, 2, 3};
  do {
    std::vector<ArenaBuffer> buffers;
    for (int i = 0; i < 4; ++i) buffers.push_back(take(2));
    for (const int i : order) arena_.keep(std::move(buffers[i]));
    ArenaBuffer all = take(8);
    EXPECT_TRUE(is_of_slab(all));
    arena_.keep(std::move(all));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(SlabArena, TakesTheSmallestRoomThatServes) {
  ArenaBuffer first = take(4);
  const ArenaBuffer second = take(2);
  arena_.keep(std::move(first));  // 4 pieces are free there, and 2 behind the second
  const ArenaBuffer small = take(1);
  EXPECT_EQ(begin(small), 7);
  EXPECT_EQ(begin(take(3)), 0);
}

TEST_F(SlabArena, WithoutRoomInOnePieceABufferIsAnAllocationAndFreedAfterwards) {
  ArenaBuffer first = take(3), second = take(3), last = take(2);
  arena_.keep(std::move(first));
  arena_.keep(std::move(last));
  const int64_t before = record_.bytes(0);
  ArenaBuffer outside = take(4);  // 5 pieces are free, in two rooms
  EXPECT_FALSE(is_of_slab(outside));
  EXPECT_EQ(record_.bytes(0), before + 4 * kPiece);
  arena_.keep(std::move(outside));
  EXPECT_EQ(record_.bytes(0), before);
  EXPECT_TRUE(is_of_slab(second));
}

// Each stream waits for the last use of all that it writes over, and for nothing else.
TEST_F(SlabArena, WhoWritesIsBehindEveryEarlierUse) {
  const SideStream gathers(fake_device());
  std::vector<ArenaBuffer> buffers;
  for (int i = 0; i < 4; ++i) buffers.push_back(take(2));
  const auto fill = [&](ArenaBuffer& buffer, int value) {
    {
      const OnStream on(gathers);
      buffer.begin_write();
      at::Tensor(buffer.memory()).fill_(value);
      buffer.end_write();
    }
    buffer.begin_read();
    (void)buffer.memory().exp();
  };
  for (ArenaBuffer& buffer : buffers) fill(buffer, 1);
  for (const int i : {2, 0, 3, 1}) arena_.keep(std::move(buffers[i]));
  ArenaBuffer joined = take(5), rest = take(3);
  fill(joined, 2);
  fill(rest, 3);
  arena_.keep(std::move(joined));
  ArenaBuffer part = take(2);
  (void)at::zeros({4}, bytes_on_device()).log();  // computes elsewhere
  fill(part, 4);
  std::vector<FakeOperation> fills, others;
  for (const FakeOperation& operation : record_.operations()) {
    if (operation.name == "aten::fill_") fills.push_back(operation);
    if (operation.name == "aten::log") others.push_back(operation);
  }
  ASSERT_FALSE(fills.empty());
  ASSERT_EQ(others.size(), 1u);
  EXPECT_FALSE(runs_after(fills.back(), others[0]));
}

TEST_F(SlabArena, WhoWritesIsBehindUsesOnEveryStream) {
  const SideStream gathers(fake_device());
  const auto use = [&](ArenaBuffer& buffer, int value) {
    {
      const OnStream on(gathers);
      buffer.begin_write();
      at::Tensor(buffer.memory()).fill_(value);
      buffer.end_write();
    }
    buffer.begin_read();
    (void)buffer.memory().exp();
  };
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<ArenaBuffer> buffers;
    for (int i = 0; i < 4; ++i) {
      const OnStream elsewhere{SideStream(fake_device())};  // owns the buffer
      buffers.push_back(take(2));
      use(buffers[i], turn);
    }
    for (const int i : {turn, 3, (turn + 1) % 3, (turn + 2) % 3}) arena_.keep(std::move(buffers[i]));
    ArenaBuffer all = take(8);
    use(all, 7);
    arena_.keep(std::move(all));
  }
}

// Ranks that take and keep the same have the same places, whatever their devices are behind with.
TEST_F(SlabArena, PlacesFollowFromTheOrderAlone) {
  const at::Tensor other_slab = at::zeros({8 * kPiece}, bytes_on_device());
  BufferArena other(other_slab);
  std::mt19937 random(7);
  std::vector<std::pair<ArenaBuffer, ArenaBuffer>> held;
  for (int i = 0; i < 300; ++i) {
    if (random() % 2 == 0 || held.empty()) {
      const int64_t pieces = 1 + static_cast<int64_t>(random() % 4);
      held.emplace_back(take(pieces), ArenaBuffer());
      const OnStream elsewhere{SideStream(fake_device())};
      held.back().second = other.take(pieces * kPiece, bytes_on_device(), 0);
      const auto& [mine, theirs] = held.back();
      ASSERT_EQ(is_of_slab(mine), theirs.memory().is_alias_of(other_slab));
      if (!is_of_slab(mine)) continue;
      ASSERT_EQ(mine.memory().storage_offset(), theirs.memory().storage_offset());
    } else {
      const size_t index = random() % held.size();
      arena_.keep(std::move(held[index].first));
      if (i % 10 == 0) wait_quietly(fake_device());  // for one of them alone
      other.keep(std::move(held[index].second));
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
    }
  }
}

}  // namespace
}  // namespace trireme
