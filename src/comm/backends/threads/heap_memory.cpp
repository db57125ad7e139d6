#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "comm/memory.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

class HeapSegment final : public Segment, public std::enable_shared_from_this<HeapSegment> {
 public:
  HeapSegment(std::byte* data, size_t bytes) : Segment(data, bytes) {}
  ~HeapSegment() override { ::munmap(data(), bytes()); }
  SegmentTicket ticket() const override { return {::getpid(), reinterpret_cast<int64_t>(this), bytes()}; }
};

class HeapMemory final : public MemoryProvider {
 public:
  std::shared_ptr<Segment> create(size_t bytes) override {
    bytes = bytes ? bytes : 1;
    void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED)
      throw IoError(str("cannot map ", bytes, " bytes for ranks to share: ", std::strerror(errno)));
    if (bytes >= kHugePageBytes) ::madvise(data, bytes, MADV_HUGEPAGE);  // only a hint
    return std::make_shared<HeapSegment>(static_cast<std::byte*>(data), bytes);
  }

  std::shared_ptr<Segment> open(const SegmentTicket& ticket) override {
    TRIREME_CHECK(ticket.pid == ::getpid(), "a heap segment of process ", ticket.pid, " in process ", ::getpid(), ".");
    return reinterpret_cast<HeapSegment*>(ticket.handle)->shared_from_this();
  }
};

}  // namespace

std::shared_ptr<MemoryProvider> heap_memory() { return std::make_shared<HeapMemory>(); }

}  // namespace trireme::comm
