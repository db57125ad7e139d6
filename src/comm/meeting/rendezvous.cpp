#include "comm/meeting/rendezvous.h"

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "comm/fabric/fabric_backend.h"
#include "comm/host_record.h"
#include "comm/meeting/meeting_point.h"
#include "comm/memory.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/c10d.h"

namespace trireme::comm {
namespace {

struct Opened {
  std::shared_ptr<Segment> segment;  // shared with the group and its pending operations
  std::string problem;
};

/// A rank that fails must still meet its peers, or they would wait for it in vain.
template <class Open>
Opened try_to(const Open& open) {
  try {
    return {open(), ""};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

/// Rank 0 makes the control segment of a group in shared memory, the others open it.
class SharedControl {
 public:
  explicit SharedControl(const Place& place) : place_(place), provider_(file_memory()) {
    if (place.rank == 0) opened_ = try_to([this] { return provider_->create(FabricLayout(place_.size).bytes()); });
  }

  SegmentTicket ticket() const { return opened_.segment ? opened_.segment->ticket() : SegmentTicket{}; }

  /// Collective. Which rank cannot open what `ticket` is for, and why; empty: all have.
  std::string open(MeetingPoint& point, const SegmentTicket& ticket) {
    if (place_.rank != 0 && ticket.pid != 0) opened_ = try_to([&] { return provider_->open(ticket); });
    const auto problems = point.exchange("opened/", opened_.problem);
    for (size_t rank = 0; rank < problems.size(); ++rank)
      if (!problems[rank].empty()) return str("rank ", rank, " cannot join: ", problems[rank]);
    return "";
  }

  std::unique_ptr<Group> group(const WaitLimits& limits) const {
    if (!opened_.problem.empty()) throw IoError(opened_.problem);  // a world of one has nobody to tell
    GroupInfo info{.name = "world", .place = place_, .timeout = limits.timeout, .warn_after = limits.warn_after};
    return std::make_unique<Group>(std::make_unique<FabricBackend>(provider_, opened_.segment, std::move(info)));
  }
  void withdraw() const { opened_.segment->withdraw(); }

 private:
  const Place place_;
  const std::shared_ptr<MemoryProvider> provider_;  // shared with the group
  Opened opened_;
};

std::vector<HostRecord> exchange_hosts(MeetingPoint& point, const HostRecord& own) {
  std::vector<HostRecord> records;
  for (const std::string& text : point.exchange("host/", own.text())) records.push_back(HostRecord::parse(text));
  return records;
}

[[noreturn]] void refuse_hosts(const std::string& obstacle, const std::string& advice) {
  throw ConfigError(str(obstacle,
                        ", so they share no memory. Start all ranks on one host and in one container (or with "
                        "--pid=host), or ",
                        advice),
                    ErrorCode::kUnsupported);
}

/// Which group the ranks use, and what to say about it.
struct Choice {
  Transport transport;  ///< kShm or kC10d
  std::string why;      ///< empty: shared memory, as wished
};

/// Collective. What keeps the ranks from sharing memory is no error where there is a process group.
Choice choose(MeetingPoint& point, SharedControl& control, const std::vector<HostRecord>& records) {
  const Transport wish = records.front().transport;
  if (wish == Transport::kC10d) return {Transport::kC10d, "as TRIREME_COMM or the program's transport says"};
  std::string obstacle = obstacle_to_sharing(records);
  if (obstacle.empty()) obstacle = control.open(point, records.front().ticket);
  return obstacle.empty() ? Choice{Transport::kShm, ""} : Choice{Transport::kC10d, obstacle};
}

}  // namespace

std::unique_ptr<Group> meet(const LaunchVariables& launch, const WaitLimits& limits) {
  SharedControl control({launch.rank, launch.size});
  if (launch.meeting == Meeting::kAlone) return control.group(limits);

  std::optional<MeetingPoint> point(MeetingPoint::open(launch, limits));
  HostRecord own = HostRecord::of_this_process();
  own.ticket = control.ticket();
  const std::vector<HostRecord> records = exchange_hosts(*point, own);
  const std::string obstacle = obstacle_to_sharing(records);
  if (!obstacle.empty()) {
    point->farewell();
    refuse_hosts(obstacle, "join through a process group (join()).");
  }
  const std::string problem = control.open(*point, records.front().ticket);
  if (!problem.empty()) {
    point->farewell();
    throw IoError(problem);
  }

  auto group = control.group(limits);
  // The server goes last, and everybody returns only when it is gone, so that the next init() meets a new one.
  if (launch.rank != 0) point.reset();
  group->barrier();
  control.withdraw();
  point.reset();
  group->barrier();
  return group;
}

AwaitedRanks await(const LaunchVariables& launch, const WaitLimits& limits) {
  AwaitedRanks awaited{.rank = launch.rank, .size = launch.size};
  if (launch.meeting == Meeting::kAlone) return awaited;
  auto point = std::make_shared<MeetingPoint>(MeetingPoint::open(launch, limits));
  (void)point->exchange("came/", "");
  if (launch.meeting == Meeting::kAddress) {
    awaited.host = launch.meeting_host();
    awaited.port = launch.port;
    awaited.serves = launch.serves();
    awaited.path = point->path();
  }
  awaited.meeting_point = std::move(point);
  return awaited;
}

World meet_in(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
              const JoinOptions& options, const WaitLimits& limits, const std::string& token) {
  const Place place{options.rank, options.size};
  auto point = MeetingPoint::in(store, place, {limits.timeout, token});
  SharedControl control(place);
  HostRecord own = HostRecord::of_this_process();
  own.transport = options.transport;
  own.ticket = control.ticket();
  const std::vector<HostRecord> records = exchange_hosts(point, own);
  check_one_transport(records);
  const Choice choice = choose(point, control, records);
  const Place local = local_place(records, place.rank);
  World world{
      .rank = place.rank, .size = place.size, .local_rank = local.rank, .local_size = local.size, .group = nullptr};
  if (choice.transport == Transport::kShm) {
    world.group = control.group(limits);
    world.group->barrier();
    control.withdraw();
  } else {
    if (options.transport == Transport::kShm)
      refuse_hosts(choice.why, "set TRIREME_COMM=auto, and leave the transport to be chosen.");
    if (!process_group && options.transport == Transport::kC10d)
      throw ConfigError("join: transport c10d needs a process group, got none");
    if (!process_group) refuse_hosts(choice.why, "hand over a process group.");
    world.group =
        make_c10d_group(process_group, {.name = "world", .timeout = limits.timeout, .warn_after = limits.warn_after});
  }
  if (place.rank == 0) {
    const bool shm = choice.transport == Transport::kShm;
    const std::string by =
        shm ? "shared memory"
            : str("c10d process group (", process_group->getBackend(c10::DeviceType::CPU)->getBackendName(), ")");
    log(LogLevel::kInfo, str("comm: ", by, " among ", place.size, " ranks ", shm ? "of " : "on ", hosts_of(records),
                             shm ? "" : str("; ", choice.why)));
  }
  return world;
}

}  // namespace trireme::comm
