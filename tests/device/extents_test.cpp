// Extents by themselves: whatever is read comes behind what was put back, and memory is there while it is lent.
#include "trireme/device/extents.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"

namespace trireme {
namespace {

constexpr int64_t kBytes = 12000;

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

struct ExtentsTest : ::testing::Test {
  testing::TemporaryFolder folder;
  bool fails = false;
  Extents extents{
      {{kBytes}, {2 * kBytes}, {kBytes}},
      {.folder = folder.path().string(),
       .buffers = 3,
       .make_file = [this](const std::string& in,
                           int64_t bytes) { return std::make_unique<LateFile>(make_disk_file(in, bytes), fails); }},
      {"the.key", "what is there"}};

  static int64_t bytes_of(int extent) { return extent == 1 ? 2 * kBytes : kBytes; }
  /// The one value of all bytes of the extent; nothing where they differ.
  std::optional<int> value(int extent) {
    std::vector<std::byte> to(bytes_of(extent));
    extents.read(extent, to).get();
    return std::count(to.begin(), to.end(), to.front()) == bytes_of(extent) ? std::optional(int(to.front()))
                                                                            : std::nullopt;
  }
  static void fill(std::span<std::byte> memory, int value) {
    std::fill(memory.begin(), memory.end(), std::byte(value));
  }
  void set(int extent, int value) {
    fill(extents.bring(extent), value);
    extents.put_back(extent);
  }
  void write(int extent, int value) {
    const std::vector<std::byte> from(bytes_of(extent), std::byte(value));
    extents.write(extent, from);
  }
};

TEST_F(ExtentsTest, AreZerosAndThenWhatWasWritten) {
  EXPECT_EQ(value(1), 0);
  write(2, 7);
  EXPECT_EQ(value(2), 7);
  EXPECT_EQ(value(0), 0);
  fill(extents.take(1), 9);
  extents.put_back(1);
  EXPECT_EQ(value(1), 9);
}

TEST_F(ExtentsTest, HaveMemoryToReadInto) {
  at::Tensor memory = Extents::memory(kBytes, at::TensorOptions(at::kFloat));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data_ptr()) % kDiskAlignment, 0);
  memory.fill_(8);
  const at::Tensor view = memory.narrow(0, 1, 5);
  memory.reset();
  EXPECT_EQ(view.sum().item<float>(), 40);
}

TEST_F(ExtentsTest, AreReadBehindWhatWasPutBack) {
  set(0, 3);
  EXPECT_EQ(value(0), 3);
  set(0, 4);
  const std::span<std::byte> memory = extents.bring(0);
  EXPECT_EQ(int(memory.back()), 4);
  fill(memory, 5);
  extents.drop(0);
  EXPECT_EQ(value(0), 4);
}

TEST_F(ExtentsTest, ThatAreReadAheadAreDroppedWhereTheyAreWrittenMeanwhile) {
  const std::vector<int> next{1, 2};
  (void)extents.bring(0, next);
  write(1, 7);
  extents.put_back(0);
  EXPECT_EQ(int(extents.bring(1).back()), 7);
  extents.put_back(1);
  extents.put_back(2);  // which was not brought
  extents.settle();
  EXPECT_EQ(value(2), 0);
}

TEST_F(ExtentsTest, AreReadAndWrittenInSlicesAcrossThem) {
  const std::vector<Extents::Piece> pieces{{2, {100}, {40}}, {0, {8}, {4}}, {1, {0}, {16}}};
  SliceStore* const slice = extents.slice(at::kFloat, pieces);
  EXPECT_EQ(slice, extents.slice(at::kFloat, pieces));
  EXPECT_EQ(slice->numel(), 15);
  set(0, 1);
  std::vector<std::byte> values(60);
  for (int i = 0; i < 60; ++i) values[i] = std::byte(i + 100);
  slice->write({}, values);
  std::vector<std::byte> found(20);
  slice->read({35}, found);
  EXPECT_TRUE(std::equal(found.begin(), found.end(), values.begin() + 35));
  EXPECT_EQ(int(extents.bring(0)[8]), 140);
  EXPECT_EQ(int(extents.bring(0)[12]), 1);
}

TEST_F(ExtentsTest, AreNotUsedAfterAWriteThatFailed) {
  set(2, 1);
  extents.settle();
  fails = true;
  set(0, 3);
  EXPECT_EQ(testing::error_of<IoError>([&] { extents.settle(); }), "the disk is gone");
  fails = false;
  for (const int extent : {0, 2}) {
    EXPECT_SAYS(testing::error_of<StateError>([&] { (void)extents.bring(extent); }),
                "what is there: not all was written (the disk is gone)");
    EXPECT_SAYS(testing::error_of<StateError>([&] { (void)value(extent); }), "load a checkpoint into a new engine");
  }
}

}  // namespace
}  // namespace trireme
