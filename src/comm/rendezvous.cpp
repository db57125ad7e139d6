#include "comm/rendezvous.h"

#include <unistd.h>

#include <climits>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "comm/fabric/fabric_group.h"
#include "comm/memory.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

// Ranks that are told to stop must have read why before rank 0 takes the server away.
constexpr std::chrono::seconds kFarewell{10};

/// The first line of libtorch's error: the rest is a stack trace.
std::string reason(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

struct HostRecord {
  std::string host;
  std::string boot_id;        ///< one kernel
  std::string pid_namespace;  ///< process ids mean the same
  SegmentTicket ticket;       ///< rank 0: the control segment

  std::string text() const {
    return str(host, " ", boot_id, " ", pid_namespace, " ", ticket.pid, " ", ticket.handle, " ", ticket.bytes);
  }
  static HostRecord parse(const std::string& text) {
    HostRecord record;
    std::istringstream(text) >> record.host >> record.boot_id >> record.pid_namespace >> record.ticket.pid >>
        record.ticket.handle >> record.ticket.bytes;
    return record;
  }
  static HostRecord of_this_process() {
    HostRecord record;
    char name[HOST_NAME_MAX + 1] = "";
    ::gethostname(name, sizeof(name) - 1);
    char target[64] = "";
    const ssize_t length = ::readlink("/proc/self/ns/pid", target, sizeof(target) - 1);
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    record.host = *name ? name : "unknown";
    record.boot_id = boot.empty() ? "unknown" : boot;
    record.pid_namespace = length > 0 ? target : "unknown";
    return record;
  }
};

/// The store of one job, with errors that name what went wrong.
class MeetingPoint {
 public:
  MeetingPoint(const LaunchVariables& launch, std::chrono::milliseconds timeout)
      : launch_(launch), where_(launch.meeting == Meeting::kFile ? launch.path : str(launch.host, ":", launch.port)) {
    try {
      store_ = open(timeout);
      // A process may join several times; each time has keys of its own.
      const int64_t time = store_->add(str("trireme/", launch.attempt, "/joined/", launch.rank), 1);
      store_ = c10::make_intrusive<c10d::PrefixStore>(str("trireme/", launch.attempt, "/", time), store_);
    } catch (const std::exception& error) {
      throw IoError(str("rank ", launch.rank, " cannot use ", where_, ", where the ranks are to meet: ", reason(error),
                        ". If the address is taken, set another MASTER_PORT."));
    }
  }

  /// Gives `text` to every rank and returns everybody's, in rank order.
  std::vector<std::string> exchange(const std::string& key, const std::string& text) {
    int peer = launch_.rank;
    try {
      store_->set(key + std::to_string(launch_.rank), text);
      std::vector<std::string> all;
      for (peer = 0; peer < launch_.size; ++peer) all.push_back(store_->get_to_str(key + std::to_string(peer)));
      return all;
    } catch (const std::exception& error) {
      throw CommError(ErrorCode::kTimeout, str("rank ", launch_.rank, " waited at ", where_, " for rank ", peer, " of ",
                                               launch_.size, ", which did not come: ", reason(error)));
    }
  }

  /// Rank 0 stays until every rank has come here.
  void farewell() noexcept {
    try {
      const auto end = std::chrono::steady_clock::now() + kFarewell;
      int64_t gone = store_->add("gone", 1);
      while (launch_.rank == 0 && gone < launch_.size && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        gone = store_->add("gone", 0);
      }
    } catch (...) {
      // The error that brought us here is the one to report.
    }
  }

 private:
  c10::intrusive_ptr<c10d::Store> open(std::chrono::milliseconds timeout) {
    if (launch_.meeting == Meeting::kFile) {
      auto store = c10::make_intrusive<c10d::FileStore>(launch_.path, launch_.size);
      store->setTimeout(timeout);
      return store;
    }
    c10d::TCPStoreOptions options;
    options.port = launch_.port;
    options.isServer = launch_.rank == 0 && !launch_.launcher_serves;
    options.numWorkers = static_cast<size_t>(launch_.size);
    options.waitWorkers = false;
    options.timeout = timeout;
    options.multiTenant = true;  // torch.distributed in the same program may use the same address
    return c10::make_intrusive<c10d::TCPStore>(launch_.host, options);
  }

  const LaunchVariables& launch_;
  const std::string where_;
  c10::intrusive_ptr<c10d::Store> store_;
};

void check_one_host(const std::vector<HostRecord>& records) {
  const HostRecord& first = records.front();
  for (size_t rank = 1; rank < records.size(); ++rank) {
    const HostRecord& other = records[rank];
    if (other.host != first.host || other.boot_id != first.boot_id)
      throw ConfigError(str("rank 0 runs on host ", first.host, ", rank ", rank, " on host ", other.host,
                            ": more than one host needs a backend that is not there yet. Start all ranks on one host."),
                        ErrorCode::kUnsupported);
    if (other.pid_namespace != first.pid_namespace)
      throw ConfigError(
          str("rank 0 and rank ", rank, " run on host ", first.host, " in different containers (PID namespaces ",
              first.pid_namespace, " and ", other.pid_namespace,
              "), so they cannot share memory. Start all ranks "
              "in one container, or with --pid=host."),
          ErrorCode::kUnsupported);
  }
}

struct Opened {
  std::shared_ptr<Segment> segment;  // shared with the group and its pending operations
  std::string problem;
};

Opened open_segment(const std::shared_ptr<MemoryProvider>& provider, const SegmentTicket& ticket) {
  try {
    return {provider->open(ticket), ""};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

}  // namespace

std::unique_ptr<Group> meet(const LaunchVariables& launch, std::chrono::milliseconds timeout) {
  const auto provider = file_memory();
  const FabricOptions options{.name = "world", .place = {launch.rank, launch.size}, .timeout = timeout};
  Opened control;
  if (launch.rank == 0) control.segment = provider->create(FabricLayout(launch.size).bytes());
  if (launch.meeting == Meeting::kAlone) return std::make_unique<FabricGroup>(provider, control.segment, options);

  auto point = std::make_unique<MeetingPoint>(launch, timeout);
  HostRecord own = HostRecord::of_this_process();
  if (control.segment) own.ticket = control.segment->ticket();
  std::vector<HostRecord> records;
  for (const std::string& text : point->exchange("host/", own.text())) records.push_back(HostRecord::parse(text));
  try {
    check_one_host(records);
  } catch (const ConfigError&) {
    point->farewell();
    throw;
  }
  if (launch.rank != 0) control = open_segment(provider, records.front().ticket);
  const auto problems = point->exchange("opened/", control.problem);
  for (size_t rank = 0; rank < problems.size(); ++rank)
    if (!problems[rank].empty()) {
      point->farewell();
      throw IoError(str("rank ", rank, " cannot join: ", problems[rank]));
    }

  auto group = std::make_unique<FabricGroup>(provider, control.segment, options);
  // The server goes last, and everybody returns only when it is gone, so that the next init() meets a new one.
  if (launch.rank != 0) point.reset();
  group->barrier();
  control.segment->withdraw();
  point.reset();
  group->barrier();
  return group;
}

}  // namespace trireme::comm
