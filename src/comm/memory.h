// Where memory that several ranks see comes from. Two providers: the heap (ranks are threads) and memory files
// (processes).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace trireme::comm {

constexpr size_t kHugePageBytes = 2 << 20;  // from here on the system is asked for huge pages

/// A rank's message to its peers so that they can open its segment. Plain bytes: travels through a collective.
struct SegmentTicket {
  int64_t pid = 0;
  int64_t handle = 0;  ///< heap: address of the segment; memory file: file descriptor
  uint64_t bytes = 0;
  std::array<uint64_t, 2> mark = {};  ///< memory file: random, a part of its name; nobody else's file has it
};

/// A mapped piece of shared memory: zero-filled at first, page-aligned. The memory goes with its last holder.
class Segment {
 public:
  virtual ~Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  /// Valid on the rank that created the segment, until withdraw().
  virtual SegmentTicket ticket() const = 0;
  /// Call when every peer has opened the segment: the ticket is of no use any more.
  virtual void withdraw() noexcept {}

 protected:
  Segment(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}

 private:
  std::byte* const data_;
  const size_t bytes_;
};

class MemoryProvider {
 public:
  virtual ~MemoryProvider() = default;
  // shared_ptr: tensors of the pager, groups and their pending operations hold the same mapping.
  /// Throws Error(kIo) when the system refuses.
  virtual std::shared_ptr<Segment> create(size_t bytes) = 0;
  /// The segment that `ticket` is of. Throws IoError as well for a memory file that is another one: a ticket may have
  /// been forged where ranks meet.
  virtual std::shared_ptr<Segment> open(const SegmentTicket& ticket) = 0;
};

std::shared_ptr<MemoryProvider> heap_memory();
std::shared_ptr<MemoryProvider> file_memory();

}  // namespace trireme::comm
