#include "trireme/base/file.h"
#include "trireme/base/new_file.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "tests/base/faults.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using testing::error_of;
using Path = std::filesystem::path;

/// A folder of its own for each test, removed at the end.
class File : public ::testing::Test {
 protected:
  FileSystem& files_ = posix_file_system();
  testing::TemporaryFolder folder_;
};

TEST_F(File, ReadsBackWhatWasAppended) {
  auto file = files_.create(folder_ / "a");
  file->write("hello ", 6);
  file->write("world", 5);
  file->sync();
  file->close();
  EXPECT_EQ(files_.read(folder_ / "a"), "hello world");
  EXPECT_EQ(files_.size(folder_ / "a"), 11u);
}

TEST_F(File, ReadsAFileLargerThanItsBlocks) {
  const std::string large(200'000, 'x');
  write_file_atomically(files_, folder_ / "a", large + "end");
  EXPECT_EQ(files_.read(folder_ / "a"), large + "end");
}

TEST_F(File, EmptiesAFileThatIsCreatedAgain) {
  files_.create(folder_ / "a")->write("old contents", 12);
  files_.create(folder_ / "a")->write("new", 3);
  EXPECT_EQ(files_.read(folder_ / "a"), "new");
}

TEST_F(File, MapsTheBytesOfAFileAndNoneOfAnEmptyOne) {
  files_.create(folder_ / "a")->write("bytes", 5);
  files_.create(folder_ / "empty");
  const auto mapped = files_.map(folder_ / "a");
  ASSERT_EQ(mapped->bytes(), 5u);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(mapped->data()), 5), "bytes");
  EXPECT_EQ(files_.map(folder_ / "empty")->bytes(), 0u);
}

TEST_F(File, ReadsPiecesIntoTheCallersMemory) {
  files_.create(folder_ / "a")->write("0123456789", 10);
  const auto file = files_.open(folder_ / "a");
  EXPECT_EQ(file->bytes(), 10u);
  char piece[4] = {};
  file->read(7, piece, 3);
  EXPECT_STREQ(piece, "789");
  EXPECT_EQ(error_of([&] { file->read(8, piece, 3); }),
            (folder_ / "a").string() + ": read of 3 bytes failed: the file ends at byte 10");
}

TEST_F(File, ListsNamesInOrder) {
  files_.create(folder_ / "b");
  files_.create(folder_ / "a");
  files_.create_directories(folder_ / "c" / "deep");
  EXPECT_EQ(files_.list(folder_.path()), (std::vector<std::string>{"a", "b", "c"}));
}

TEST_F(File, RemovesAFolderWithAllThatIsInIt) {
  files_.create_directories(folder_ / "c" / "deep");
  files_.create(folder_ / "c" / "deep" / "file");
  files_.remove_all(folder_ / "c");
  EXPECT_FALSE(files_.exists(folder_ / "c"));
  files_.remove_all(folder_ / "c");  // nothing there: fine
}

TEST_F(File, RenamesOverAFile) {
  files_.create(folder_ / "a")->write("new", 3);
  files_.create(folder_ / "b")->write("old", 3);
  files_.rename(folder_ / "a", folder_ / "b");
  files_.sync_directory(folder_.path());
  EXPECT_EQ(files_.read(folder_ / "b"), "new");
  EXPECT_FALSE(files_.exists(folder_ / "a"));
}

TEST_F(File, NamesPathOperationAndReasonOfEveryFailure) {
  const Path none = folder_ / "none";
  const std::string gone = ": No such file or directory";
  const std::string at = none.string() + ": ";
  EXPECT_EQ(error_of([&] { files_.read(none); }), at + "open for reading failed" + gone);
  EXPECT_EQ(error_of([&] { files_.map(none); }), at + "open for reading failed" + gone);
  EXPECT_EQ(error_of([&] { files_.size(none); }), at + "stat failed" + gone);
  EXPECT_EQ(error_of([&] { files_.list(none); }), at + "list failed" + gone);
  EXPECT_EQ(error_of([&] { files_.sync_directory(none); }), at + "open directory failed" + gone);
  EXPECT_EQ(error_of([&] { files_.rename(none, folder_ / "b"); }),
            at + "rename to " + (folder_ / "b").string() + " failed" + gone);
  EXPECT_EQ(error_of([&] { files_.create(none / "a"); }), (none / "a").string() + ": create failed" + gone);
  files_.create(folder_ / "a");
  EXPECT_EQ(error_of([&] { files_.create_directories(folder_ / "a" / "b"); }),
            (folder_ / "a" / "b").string() + ": create directory failed: Not a directory");
}

TEST_F(File, SaysThatTheDiskIsFull) {
  auto full = files_.create("/dev/full");  // the kernel's always-full device
  EXPECT_EQ(error_of([&] { full->write("x", 1); }), "/dev/full: write of 1 bytes failed: No space left on device");
}

TEST_F(File, ReadsNothingThatIsNoFileAndWaitsForNobody) {
  const Path pipe = folder_ / "pipe", socket_path = folder_ / "socket";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  socket_path.string().copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  for (const auto& [path, kind] : {std::pair<Path, std::string>(pipe, "a pipe"),
                                   {socket_path, "a socket"},
                                   {"/dev/zero", "a device"},
                                   {folder_.path(), "a folder"}}) {
    const std::string error = path.string() + ": this is " + kind + ", expected a file; give the path of a file";
    EXPECT_EQ(error_of([&] { (void)files_.read(path); }), error);
    EXPECT_EQ(error_of([&] { (void)files_.open(path); }), error);
    EXPECT_EQ(error_of([&] { (void)files_.map(path); }), error);
    EXPECT_EQ(error_of([&] { (void)files_.size(path); }), error);
  }
  ::close(socket);
}

/// Writes beyond the limit on the size of files, in a process of its own; ends it with what happened.
[[noreturn]] void write_beyond_the_limit(const Path& path) {
  const rlimit tight{100, 100};
  if (::setrlimit(RLIMIT_FSIZE, &tight) != 0) ::_exit(3);
  std::string said = "nothing";
  try {
    posix_file_system().create(path)->write(std::string(200, 'x').data(), 200);
  } catch (const IoError& error) {
    said = error.what();
  }
  sigset_t blocked, pending;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  ::sigpending(&pending);
  struct sigaction disposition {};
  ::sigaction(SIGXFSZ, nullptr, &disposition);
  const bool is_as_before =
      sigismember(&blocked, SIGXFSZ) == 0 && sigismember(&pending, SIGXFSZ) == 0 && disposition.sa_handler == SIG_DFL;
  const std::string expected =
      path.string() + ": write of 200 bytes failed: File too large; raise the limit on the size of files (ulimit -f)";
  ::_exit(said == expected && is_as_before ? 0 : 1);
}

TEST_F(File, SaysThatAFileWouldBeLargerThanAllowedInsteadOfEndingTheProgram) {
  const pid_t child = ::fork();
  if (child == 0) write_beyond_the_limit(folder_ / "a");
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(File, AtomicWriteReplacesTheContentsAndLeavesNothingElse) {
  write_file_atomically(files_, folder_ / "a", "old");
  write_file_atomically(files_, folder_ / "a", "new");
  EXPECT_EQ(files_.read(folder_ / "a"), "new");
  EXPECT_EQ(files_.list(folder_.path()), (std::vector<std::string>{"a"}));
}

TEST_F(File, AtomicWriteOnAFullDiskKeepsTheOldContents) {
  write_file_atomically(files_, folder_ / "a", "old");
  testing::FaultyFiles full(1, testing::FaultyFiles::Then::kRecover);  // the write
  EXPECT_NE(error_of([&] { write_file_atomically(full, folder_ / "a", "new"); }).find("No space left on device"),
            std::string::npos);
  EXPECT_EQ(files_.read(folder_ / "a"), "old");
  EXPECT_EQ(files_.list(folder_.path()), (std::vector<std::string>{"a"}));
}

TEST_F(File, NewFilesAppearTogetherOrNotAtAll) {
  for (int fail_at = 0;; ++fail_at) {
    testing::FaultyFiles faulty(fail_at, testing::FaultyFiles::Then::kRecover);
    const auto write_both = [&] {
      NewFiles new_files(faulty);
      new_files.add(folder_ / "a").write("first");
      new_files.add(folder_ / "b", "second");
      new_files.commit();
    };
    if (fail_at == 12) {  // two of each: create, write, sync, close, rename, sync of the folder
      write_both();
      break;
    }
    EXPECT_NE(error_of(write_both).find("No space left on device"), std::string::npos) << fail_at;
    EXPECT_EQ(files_.list(folder_.path()), std::vector<std::string>()) << fail_at;
  }
  EXPECT_EQ(files_.read(folder_ / "a") + files_.read(folder_ / "b"), "firstsecond");
  EXPECT_EQ(files_.list(folder_.path()), (std::vector<std::string>{"a", "b"}));
}

}  // namespace
}  // namespace trireme
