// Memory files (memfd): they have no name in any file system, so a crash leaves nothing behind. Peers open
// /proc/PID/fd/FD.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "comm/memory.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

class FileSegment final : public Segment {
 public:
  FileSegment(std::byte* data, size_t bytes, int fd) : Segment(data, bytes), fd_(fd) {}
  ~FileSegment() override {
    ::munmap(data(), bytes());
    withdraw();
  }
  SegmentTicket ticket() const override { return {::getpid(), fd_, bytes()}; }
  void withdraw() noexcept override {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

std::shared_ptr<Segment> map(int fd, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    ::close(fd);
    throw IoError(str("cannot map ", bytes, " bytes of shared memory: ", std::strerror(error)));
  }
  if (bytes >= kHugePageBytes) ::madvise(data, bytes, MADV_HUGEPAGE);  // ignored where shmem_enabled is "never"
  return std::make_shared<FileSegment>(static_cast<std::byte*>(data), bytes, fd);
}

class FileMemory final : public MemoryProvider {
 public:
  std::shared_ptr<Segment> create(size_t bytes) override {
    bytes = bytes ? bytes : 1;
    const int fd = ::memfd_create("trireme", MFD_CLOEXEC);
    if (fd < 0) throw IoError(str("cannot create a memory file: ", std::strerror(errno)));
    if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
      const int error = errno;
      ::close(fd);
      throw IoError(str("cannot size a memory file to ", bytes, " bytes: ", std::strerror(error)));
    }
    return map(fd, bytes);
  }

  std::shared_ptr<Segment> open(const SegmentTicket& ticket) override {
    const std::string path = str("/proc/", ticket.pid, "/fd/", ticket.handle);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0)
      throw IoError(str("cannot open ", path, ", the shared memory of a peer: ", std::strerror(errno),
                        ". Ranks of one host must run as the same user and in one PID namespace (container)."));
    auto segment = map(fd, ticket.bytes);
    segment->withdraw();
    return segment;
  }
};

}  // namespace

std::shared_ptr<MemoryProvider> file_memory() { return std::make_shared<FileMemory>(); }

}  // namespace trireme::comm
