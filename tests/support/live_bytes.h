// Memory that libtorch's host allocator has given to this thread and not taken back.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace trireme::testing {

/// Counts from its construction on; one at a time.
class LiveBytes {
 public:
  LiveBytes() : counter_(std::make_shared<Counter>()), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  int64_t bytes() const { return counter_->bytes; }
  /// The largest bytes() so far.
  int64_t peak_bytes() const { return counter_->peak_bytes; }

 private:
  struct Counter final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
      bytes += size;
      peak_bytes = std::max(peak_bytes, bytes);
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t bytes = 0;
    int64_t peak_bytes = 0;
  };
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace trireme::testing
