#include "checkpoint/snapshot.h"

#include <sys/mman.h>

#include <cstring>

#include "trireme/base/error.h"

namespace trireme {
namespace {

/// Copies start on cache lines of their own.
constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

size_t bytes_of(const std::vector<std::span<const std::byte>>& parts) {
  size_t bytes = 0;
  for (const auto& part : parts) bytes += aligned(part.size());
  return bytes;
}

Snapshot::~Snapshot() { release(); }

void Snapshot::release() noexcept {
  if (data_) ::munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

void Snapshot::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  release();
  void* start = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED)
    throw StateError(str("async_save: no memory for a snapshot of ", bytes,
                         " bytes; set checkpoint.async_save=false or use more ranks"));
  (void)::madvise(start, bytes, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(start);
  bytes_ = bytes;
  constexpr size_t kPageBytes = 4096;
  for (size_t at = 0; at < bytes; at += kPageBytes) data_[at] = std::byte{0};
}

void Snapshot::take(std::vector<std::span<const std::byte>>& parts) {
  TRIREME_CHECK(bytes_of(parts) <= bytes_, "The snapshot holds ", bytes_, " bytes.");
  std::byte* next = data_;
  for (auto& part : parts) {
    std::memcpy(next, part.data(), part.size());
    part = {next, part.size()};
    next += aligned(part.size());
  }
}

}  // namespace trireme
