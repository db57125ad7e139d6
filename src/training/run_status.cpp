// The answer of a training to whoever asks its process: `trireme top`.
#include "trireme/observe/run_status.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <utility>

#include "trireme/base/notices.h"
#include "trireme/comm/calls.h"
#include "trireme/device/device.h"
#include "trireme/training/training.h"

namespace trireme {
namespace {

std::vector<CallNow> calls_of(int rank) {
  const auto now = std::chrono::steady_clock::now();
  std::vector<CallNow> calls;
  for (CallUnderWay& call : calls_under_way())
    if (call.rank == rank)
      calls.push_back({.group = std::move(call.group),
                       .ranks = std::move(call.ranks),
                       .number = call.number,
                       .text = std::move(call.text),
                       .seconds = std::chrono::duration<double>(now - call.begin).count()});
  return calls;
}

}  // namespace

void Training::tell_status(c10::Device device, const std::filesystem::path& folder) {
  const Group& world = groups_.model;
  const int rank = world.world_rank(world.rank());
  const std::string job = job_of_this_process(world.size());
  std::error_code error;
  const auto whole = [&error](const std::filesystem::path& path) {
    return path.empty() ? "" : std::filesystem::absolute(path, error).string();
  };
  const std::string place = whole(folder), record = whole(config_.observe.record);
  told_status_ = std::make_unique<ToldStatus>(
      rank, world.size(), job, [counts = counts_, rank, ranks = world.size(), job, place, record, device] {
        RankNow now{.pid = ::getpid(), .rank = rank, .ranks = ranks, .job = job, .folder = place};
        counts->write_to(now);
        if (!device.is_cpu()) now.device_bytes = device_memory(device).bytes;
        now.calls = calls_of(rank);
        now.record = record;
        if (const auto since = outside_since())
          now.seconds_outside = std::chrono::duration<double>(std::chrono::steady_clock::now() - *since).count();
        return now;
      });
}

}  // namespace trireme
