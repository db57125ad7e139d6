#include "trireme/observe/observation.h"

#include <map>
#include <mutex>
#include <string>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/log.h"
#include "trireme/device/device.h"
#include "trireme/observe/metrics.h"

namespace trireme {
namespace {

struct HeardCommsLog {
  std::shared_ptr<CommsLog> log;
  std::unique_ptr<Listening> hears;  ///< null: it is off
};

struct HeardTimeline {
  std::weak_ptr<Timeline> timeline;
  std::weak_ptr<Listening> hears;
};

// The listeners of this process's ranks: one rank, but for tests, whose ranks are threads.
struct OfRanks {
  std::mutex mutex;
  std::map<int, HeardCommsLog> comms_logs;  // guarded by mutex
  std::map<int, HeardTimeline> timelines;   // guarded by mutex
};

// For ever: a group's thread may tell while the process ends.
OfRanks& of_ranks() {
  static auto* const made = new OfRanks;
  return *made;
}

std::string memory_text(c10::Device device) {
  const MemoryUse host = memory_use();
  std::string text = "memory | host resident: " + size_text(static_cast<double>(host.rss_bytes), 2);
  text += " | proportional: " + size_text(static_cast<double>(host.pss_bytes), 2);
  if (device.is_cpu()) return text;
  const DeviceMemory memory = device_memory(device);
  return text + " | device allocated: " + size_text(static_cast<double>(memory.bytes), 2) +
         " | peak: " + size_text(static_cast<double>(memory.peak_bytes), 2);
}

}  // namespace

std::shared_ptr<CommsLog> configure_comms_log(int rank, const CommsLoggerOptions& options) {
  check_operations(options, "prof_ops");
  OfRanks& ranks = of_ranks();
  const std::lock_guard lock(ranks.mutex);
  HeardCommsLog& own = ranks.comms_logs[rank];
  if (!own.log) own.log = std::make_shared<CommsLog>(options);
  own.log->set_options(options);
  if (!options.enabled) own.hears.reset();
  if (options.enabled && !own.hears) own.hears = std::make_unique<Listening>(rank, own.log);
  return own.log;
}

std::shared_ptr<CommsLog> comms_log_of(int rank) {
  OfRanks& ranks = of_ranks();
  const std::lock_guard lock(ranks.mutex);
  const auto found = ranks.comms_logs.find(rank);
  return found == ranks.comms_logs.end() ? nullptr : found->second.log;
}

Observation::Observation(const ObserveOptions& options, int rank, c10::Device device) {
  if (options.timeline.enabled) {
    OfRanks& ranks = of_ranks();
    const std::lock_guard lock(ranks.mutex);
    HeardTimeline& own = ranks.timelines[rank];
    timeline_ = own.timeline.lock();
    hears_all_ = own.hears.lock();
    if (!timeline_) {
      timeline_ = std::make_shared<Timeline>(rank, options.timeline);
      hears_all_ = std::make_shared<Listening>(rank, timeline_);
      own = {timeline_, hears_all_};
    }
  }
  if (options.comms_logger.enabled) configure_comms_log(rank, options.comms_logger);
  if (options.wall_clock_breakdown || options.memory_breakdown) {
    const bool tells = rank == 0;
    timers_ = std::make_shared<StepTimers>([tells, options, device](const StepTimes& times) {
      if (!tells) return;
      std::string text = str("step=", times.step);
      if (options.wall_clock_breakdown) text += ", " + to_text(times);
      if (options.memory_breakdown) text += ", " + memory_text(device);
      log(LogLevel::kInfo, text);
    });
    hears_times_.emplace(rank, timers_);
  }
}

Observation::~Observation() = default;

}  // namespace trireme
