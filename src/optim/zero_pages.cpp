#include "optim/zero_pages.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "trireme/base/error.h"

namespace trireme {

namespace {
constexpr size_t kHugePageBytes = size_t{2} << 20;
}

at::Tensor zero_pages(int64_t numel, at::ScalarType dtype) {
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  if (bytes < 4096) return at::zeros({numel}, dtype);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    throw IoError(str("optimizer states: the system refuses ", bytes, " bytes (", std::strerror(errno),
                      "); use more ranks or a higher ZeRO stage"));
  // Fewer page faults in the first step; only a hint.
  if (bytes >= kHugePageBytes) (void)madvise(data, bytes, MADV_HUGEPAGE);
  return at::from_blob(
      data, {numel}, [bytes](void* start) { munmap(start, bytes); }, dtype);
}

}  // namespace trireme
