// Memory files (memfd): they have no name in any file system, so a crash leaves nothing behind. Peers open
// /proc/PID/fd/FD, and look what it is before they write a byte: who tells a rank that number may be a stranger.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "comm/memory.h"
#include "trireme/base/error.h"
#include "trireme/base/file_limit.h"
#include "trireme/base/random_text.h"

namespace trireme::comm {
namespace {

using Mark = std::array<uint64_t, 2>;

std::string memory_name(const Mark& mark) { return "trireme-" + hexadecimal(mark); }

class FileSegment final : public Segment {
 public:
  FileSegment(std::byte* data, size_t bytes, int fd, const Mark& mark) : Segment(data, bytes), fd_(fd), mark_(mark) {}
  ~FileSegment() override {
    ::munmap(data(), bytes());
    withdraw();
  }
  SegmentTicket ticket() const override { return {::getpid(), fd_, bytes(), mark_}; }
  void withdraw() noexcept override {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
  const Mark mark_;
};

std::shared_ptr<Segment> map(int fd, size_t bytes, const Mark& mark) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    ::close(fd);
    throw IoError(str("cannot map ", bytes, " bytes of shared memory: ", std::strerror(error)));
  }
  if (bytes >= kHugePageBytes) ::madvise(data, bytes, MADV_HUGEPAGE);  // ignored where shmem_enabled is "never"
  return std::make_shared<FileSegment>(static_cast<std::byte*>(data), bytes, fd, mark);
}

/// A descriptor that says what a file is and can neither read nor write it.
class FileLook {
 public:
  explicit FileLook(const std::string& path) : fd_(::open(path.c_str(), O_PATH | O_CLOEXEC)) {
    if (fd_ < 0)
      throw IoError(str("cannot open ", path, ", the shared memory of a peer: ", std::strerror(errno),
                        ". Ranks of one host must run as the same user and in one PID namespace (container)."));
  }
  ~FileLook() { ::close(fd_); }
  FileLook(const FileLook&) = delete;
  FileLook& operator=(const FileLook&) = delete;

  /// The file that was looked at, whatever its first path leads to by now.
  std::string path() const { return str("/proc/self/fd/", fd_); }

  /// Sign that the file is not the one of `ticket`; empty: there is none.
  std::string difference(const SegmentTicket& ticket) const {
    char link[256] = "";
    const ssize_t length = ::readlink(path().c_str(), link, sizeof(link) - 1);
    const std::string is(link, length > 0 ? static_cast<size_t>(length) : 0);
    const std::string expected = str("/memfd:", memory_name(ticket.mark), " (deleted)");
    struct stat about {};
    if (is != expected) return str("it is '", is, "', not '", expected, "'");
    if (::fstat(fd_, &about) != 0) return std::strerror(errno);
    if (about.st_uid != ::geteuid()) return str("it is user ", about.st_uid, "'s, not user ", ::geteuid(), "'s");
    if (!S_ISREG(about.st_mode) || static_cast<uint64_t>(about.st_size) != ticket.bytes)
      return str("it has ", about.st_size, " bytes, not ", ticket.bytes);
    return "";
  }

 private:
  const int fd_;
};

/// The limit on the size of files holds for memory files too.
int resize(int fd, size_t bytes) {
  const FileLimitScope limit;
  return ::ftruncate(fd, static_cast<off_t>(bytes));
}

class FileMemory final : public MemoryProvider {
 public:
  std::shared_ptr<Segment> create(size_t bytes) override {
    bytes = bytes ? bytes : 1;
    const Mark mark = random_words();
    const int fd = ::memfd_create(memory_name(mark).c_str(), MFD_CLOEXEC);
    if (fd < 0) throw IoError(str("cannot create a memory file: ", std::strerror(errno)));
    if (resize(fd, bytes) != 0) {
      const int error = errno;
      ::close(fd);
      throw IoError(str("cannot size a memory file to ", bytes, " bytes, the memory that ranks of a host share: ",
                        std::strerror(error), write_error_fix(error)));
    }
    return map(fd, bytes, mark);
  }

  std::shared_ptr<Segment> open(const SegmentTicket& ticket) override {
    const std::string path = str("/proc/", ticket.pid, "/fd/", ticket.handle);
    const FileLook look(path);
    if (const std::string difference = look.difference(ticket); !difference.empty())
      throw IoError(str(path, " is not the shared memory of a peer: ", difference,
                        ". Somebody else writes where the ranks meet; give all ranks one secret TRIREME_TOKEN."));
    const int fd = ::open(look.path().c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) throw IoError(str("cannot open ", path, ", the shared memory of a peer: ", std::strerror(errno)));
    auto segment = map(fd, ticket.bytes, ticket.mark);
    segment->withdraw();
    return segment;
  }
};

}  // namespace

std::shared_ptr<MemoryProvider> file_memory() { return std::make_shared<FileMemory>(); }

}  // namespace trireme::comm
