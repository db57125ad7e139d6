// Shards on disk by themselves: whatever is read comes behind what was put back, and memory is there while it is lent.
#include "pager/weights/disk_shards.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"

namespace trireme {
namespace {

constexpr int64_t kNumel = 3000;

/// A file whose writes take a while, or fail.
class LateFile final : public DiskFile {
 public:
  LateFile(std::unique_ptr<DiskFile> file, const bool& fails) : file_(std::move(file)), fails_(fails) {}
  void read(int64_t offset, std::span<std::byte> to) override { file_->read(offset, to); }
  void write(int64_t offset, std::span<const std::byte> from) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (fails_) throw IoError("the disk is gone");
    file_->write(offset, from);
  }

 private:
  std::unique_ptr<DiskFile> file_;
  const bool& fails_;
};

struct DiskShardsTest : ::testing::Test {
  testing::TemporaryFolder folder;
  bool fails = false;
  DiskShards shards{
      {{"a", kNumel, at::kFloat}, {"b", 2 * kNumel, at::kBFloat16}, {"c", kNumel, at::kFloat}},
      {.folder = folder.path().string(), .buffers = 3, .make_file = [this](const std::string& in, int64_t bytes) {
         return std::make_unique<LateFile>(make_disk_file(in, bytes), fails);
       }}};

  at::Tensor read(int index) {
    at::Tensor to = at::empty({shards.tensor(index).numel()}, shards.tensor(index).scalar_type());
    shards.read(index, to).get();
    return to;
  }
  void set(int index, double value) {
    shards.bring(index);
    shards.tensor(index).fill_(value);
    shards.put_back(index);
  }
};

TEST_F(DiskShardsTest, AreZerosAndThenWhatWasWritten) {
  EXPECT_TRUE(at::equal(read(1), at::full({2 * kNumel}, 0, at::kBFloat16)));
  const at::Tensor values = at::arange(kNumel, at::kFloat);
  shards.write(2, values);
  EXPECT_TRUE(at::equal(read(2), values));
  EXPECT_TRUE(at::equal(read(0), at::full({kNumel}, 0.0f)));
}

TEST_F(DiskShardsTest, HaveMemoryToReadInto) {
  at::Tensor memory = DiskShards::memory(kNumel, at::TensorOptions(at::kFloat));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data_ptr()) % kDiskAlignment, 0);
  memory.fill_(8);
  const at::Tensor view = memory.narrow(0, 1, 5);
  memory.reset();
  EXPECT_EQ(view.sum().item<float>(), 40);
}

TEST_F(DiskShardsTest, AreReadBehindWhatWasPutBack) {
  set(0, 3);
  EXPECT_TRUE(at::equal(read(0), at::full({kNumel}, 3.0f)));
  set(0, 4);
  shards.bring(0);
  EXPECT_TRUE(at::equal(shards.tensor(0), at::full({kNumel}, 4.0f)));
  shards.tensor(0).fill_(5);
  shards.drop(0);
  EXPECT_TRUE(at::equal(read(0), at::full({kNumel}, 4.0f)));
  set(0, 6);
  at::Tensor part = at::empty({10});
  shards.store(0, 100, 10)->read(0, {static_cast<std::byte*>(part.data_ptr()), part.nbytes()});
  EXPECT_TRUE(at::equal(part, at::full({10}, 6.0f)));
}

TEST_F(DiskShardsTest, ThatAreReadAheadAreDroppedWhereTheyAreWrittenMeanwhile) {
  const std::vector<int> next{1, 2};
  shards.bring(0, next);
  shards.write(1, at::full({2 * kNumel}, 7, at::kBFloat16));
  shards.put_back(0);
  shards.bring(1);
  EXPECT_TRUE(at::equal(shards.tensor(1), at::full({2 * kNumel}, 7, at::kBFloat16)));
  shards.put_back(1);
  shards.put_back(2);  // which was not brought
  shards.settle();
  EXPECT_TRUE(at::equal(read(2), at::full({kNumel}, 0.0f)));
}

TEST_F(DiskShardsTest, HaveMemoryOnlyWhileTheyAreLent) {
  const at::Tensor view = shards.tensor(0).narrow(0, 5, 10);
  EXPECT_SAYS(testing::error_of([&] { (void)view.sum(); }), "the owned weights of unit 'a' are on disk");
  shards.bring(0);
  view.fill_(2);
  EXPECT_EQ(shards.tensor(0).sum().item<float>(), 20);
  shards.put_back(0);
  EXPECT_SAYS(testing::error_of([&] { (void)view.sum(); }), "'a' are on disk");
}

TEST_F(DiskShardsTest, AreNotUsedAfterAWriteThatFailed) {
  set(2, 1);
  shards.settle();
  fails = true;
  set(0, 3);
  EXPECT_EQ(testing::error_of<IoError>([&] { shards.settle(); }), "the disk is gone");
  fails = false;
  for (const int index : {0, 2}) {
    EXPECT_SAYS(testing::error_of<StateError>([&] { shards.bring(index); }),
                "they could not be written (the disk is gone)");
    EXPECT_SAYS(testing::error_of<StateError>([&] { read(index); }), "load a checkpoint into a new engine");
  }
}

}  // namespace
}  // namespace trireme
