// Files without a name on disk, and transfers beside the program.
#include "trireme/device/disk.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/captured_log.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int64_t kPage = kDiskAlignment;

void fill(const DiskBuffer& buffer, int64_t bytes, int with) { std::memset(buffer.data(), with, bytes); }
bool holds(const DiskBuffer& buffer, int64_t bytes, int what) {
  const auto first = buffer.first(bytes);
  return std::all_of(first.begin(), first.end(), [&](std::byte each) { return each == std::byte(what); });
}

TEST(DiskFile, HasZerosAndThenWhatWasWrittenAndLeavesNoName) {
  const TemporaryFolder folder;
  const auto file = make_disk_file(folder / "a/b", 4 * kPage);
  const DiskBuffer buffer(2 * kPage);
  fill(buffer, 2 * kPage, 7);
  file->read(2 * kPage, buffer.first(2 * kPage));
  EXPECT_TRUE(holds(buffer, 2 * kPage, 0));
  fill(buffer, kPage, 5);
  file->write(kPage, buffer.first(kPage));
  file->read(kPage, buffer.first(2 * kPage));
  EXPECT_TRUE(holds(buffer, kPage, 5));
  EXPECT_FALSE(holds(buffer, 2 * kPage, 5));
  EXPECT_EQ(posix_file_system().list(folder / "a/b"), std::vector<std::string>());
}

TEST(DiskFile, TakesItsSpaceAtOnce) {
  const TemporaryFolder folder;
  const auto free_bytes = [&] { return std::filesystem::space(folder.path()).available; };
  const auto before = free_bytes();
  {
    const auto file = make_disk_file(folder.path(), int64_t{256} << 20);
    EXPECT_LE(free_bytes() + (200u << 20), before);
  }
  EXPECT_GE(free_bytes() + (200u << 20), before);
}

TEST(DiskFile, SaysWhatIsFreeWhereThatIsTooLittle) {
  const TemporaryFolder folder;
  const auto before = std::filesystem::space(folder.path()).available;
  const std::string text = error_of<IoError>([&] { make_disk_file(folder.path(), int64_t{1} << 42); });
  EXPECT_NE(text.find(" free: No space left on device"), std::string::npos) << text;
  EXPECT_EQ(text.find(" 0 bytes are free"), std::string::npos) << text;
  EXPECT_GE(std::filesystem::space(folder.path()).available + (200u << 20), before);
  EXPECT_NE(text.find(folder.path().string() + ": 4.4 TB are needed and "), std::string::npos) << text;
  EXPECT_NE(text.find("; give a folder of a larger disk, or use more ranks"), std::string::npos) << text;
}

TEST(DiskFile, NamesAFolderThatCannotBe) {
  const TemporaryFolder folder;
  const std::string file = folder.write("file", "text");
  EXPECT_NE(error_of<IoError>([&] { make_disk_file(file + "/inside", kPage); }).find(file + "/inside: the folder"),
            std::string::npos);
  EXPECT_NE(error_of<IoError>([&] { make_disk_file(file, kPage); }).find(file), std::string::npos);
}

TEST(DiskFile, WarnsOfAFolderThatIsMemory) {
  if (!std::filesystem::is_directory("/dev/shm")) GTEST_SKIP() << "there is no /dev/shm";
  CapturedLog log;
  const auto file = make_disk_file("/dev/shm", kPage);
  EXPECT_NE(log.text().find("/dev/shm: this folder is memory (tmpfs)"), std::string::npos) << log.text();
  const DiskBuffer buffer(kPage);  // without O_DIRECT, or with it
  fill(buffer, kPage, 3);
  file->write(0, buffer.first(kPage));
  fill(buffer, kPage, 0);
  file->read(0, buffer.first(kPage));
  EXPECT_TRUE(holds(buffer, kPage, 3));
}

TEST(DiskFile, IsReadNoFurtherThanItsEnd) {
  const TemporaryFolder folder;
  const auto file = make_disk_file(folder.path(), kPage);
  const DiskBuffer buffer(2 * kPage);
  EXPECT_NE(error_of<IoError>([&] { file->read(0, buffer.first(2 * kPage)); }).find("the file ends there"),
            std::string::npos);
}

/// Counts what is under way at a time.
class SlowFile final : public DiskFile {
 public:
  void read(int64_t offset, std::span<std::byte>) override { transfer(offset); }
  void write(int64_t offset, std::span<const std::byte>) override { transfer(offset); }
  std::atomic<int> now = 0, most = 0;

 private:
  void transfer(int64_t offset) {
    most = std::max(most.load(), ++now);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    --now;
    if (offset == 2 * kPage) throw IoError("the disk is gone");
  }
};

TEST(DiskQueue, MovesAsManyAtATimeAsItHasThreadsAndPassesErrorsOn) {
  SlowFile file;
  const DiskBuffer buffer(kPage);
  std::vector<DiskTransfer> transfers;
  {
    DiskQueue queue(file, 2);
    for (int i = 0; i < 5; ++i)
      transfers.push_back(i % 2 ? queue.write(i * kPage, buffer.first(kPage))
                                : queue.read(i * kPage, buffer.first(kPage)));
  }  // waits for them
  EXPECT_EQ(file.most, 2);
  for (int i = 0; i < 5; ++i) {
    if (i == 2)
      EXPECT_EQ(error_of<IoError>([&] { transfers[i].get(); }), "the disk is gone");
    else
      EXPECT_NO_THROW(transfers[i].get());
  }
}

// Which has none of its threads, and would wait for ever.
TEST(DiskQueue, IsRefusedInAForkedChild) {
  const testing::TemporaryFolder folder;
  const auto file = make_disk_file(folder.path(), kPage);
  DiskQueue queue(*file, 1);
  const DiskBuffer buffer(kPage);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      queue.read(0, buffer.first(kPage)).get();
    } catch (const StateError& error) {
      ::_exit(std::string(error.what()).find("was forked from process") != std::string::npos ? 7 : 8);
    }
    ::_exit(9);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST(DiskQueue, MovesPiecesToAndFromAnyMemoryAndCountsThem) {
  const testing::TemporaryFolder folder;
  const int64_t bytes = 2 * kDiskPieceBytes + 3 * kPage;
  const auto file = make_disk_file(folder.path(), bytes);
  DiskQueue queue(*file, 2);
  const DiskBuffer buffer(bytes);
  for (int64_t i = 0; i < bytes; ++i) buffer.data()[i] = static_cast<std::byte>(i % 251);
  queue.write(0, buffer.first(bytes)).get();
  std::vector<std::byte> found(bytes - 5);
  queue.read(0, found).get();
  EXPECT_TRUE(std::equal(found.begin(), found.end(), buffer.data()));
  const DiskUse use = queue.use();
  EXPECT_EQ(use.written_bytes, bytes);
  EXPECT_EQ(use.read_bytes, bytes - 5);
  EXPECT_GT(use.wait_s, 0);
}

TEST(Disk, ReadsAndWritesBytesAtAnyPlaceAndLeavesThoseBesideThem) {
  const testing::TemporaryFolder folder;
  const int64_t bytes = 2 * kDiskPieceBytes;
  const auto file = make_disk_file(folder.path(), bytes);
  const DiskBuffer scratch(kDiskPieceBytes);
  std::vector<std::byte> expected(bytes);
  std::byte value{1};
  for (const auto& [begin, size] : std::vector<std::pair<int64_t, int64_t>>{{0, 10},
                                                                            {5, 3},
                                                                            {kPage - 1, 2},
                                                                            {kPage, kPage},
                                                                            {3 * kPage + 7, 3 * kPage},
                                                                            {100, kDiskPieceBytes + 5 * kPage},
                                                                            {bytes - 1, 1}}) {
    const std::vector<std::byte> written(size, value);
    write_bytes(*file, begin, written, scratch);
    std::fill_n(expected.begin() + begin, size, value);
    value = static_cast<std::byte>(std::to_integer<int>(value) + 1);
    std::vector<std::byte> found(bytes - 3);
    read_bytes(*file, 3, found, scratch);
    EXPECT_TRUE(std::equal(found.begin(), found.end(), expected.begin() + 3)) << begin;
  }
}

}  // namespace
}  // namespace trireme
