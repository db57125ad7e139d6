#include "comm/host_record.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <fstream>
#include <sstream>

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

const char* name_of_transport(Transport transport) {
  if (transport == Transport::kShm) return "shm";
  return transport == Transport::kC10d ? "c10d" : "auto";
}

}  // namespace

std::string HostRecord::text() const {
  return str(host, " ", boot_id, " ", pid_namespace, " ", static_cast<int>(transport), " ", ticket.pid, " ",
             ticket.handle, " ", ticket.bytes, " ", ticket.mark[0], " ", ticket.mark[1]);
}

HostRecord HostRecord::parse(const std::string& text) {
  HostRecord record;
  int transport = 0;
  std::istringstream words(text);
  SegmentTicket& ticket = record.ticket;
  words >> record.host >> record.boot_id >> record.pid_namespace >> transport >> ticket.pid >> ticket.handle >>
      ticket.bytes >> ticket.mark[0] >> ticket.mark[1];
  record.transport = static_cast<Transport>(transport);
  const bool is_known = transport >= 0 && transport <= static_cast<int>(Transport::kC10d);
  if (!words || !is_known || record.text() != text)
    throw IoError(
        "what a rank has said of itself cannot be read; another version of Trireme, or somebody else, writes where "
        "the ranks meet");
  return record;
}

HostRecord HostRecord::of_this_process() {
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

std::string obstacle_to_sharing(const std::vector<HostRecord>& records) {
  const HostRecord& first = records.front();
  for (size_t rank = 1; rank < records.size(); ++rank) {
    const HostRecord& other = records[rank];
    if (!other.same_host(first))
      return str("rank 0 runs on host ", first.host, ", rank ", rank, " on host ", other.host);
    if (other.pid_namespace != first.pid_namespace)
      return str("rank 0 and rank ", rank, " run on host ", first.host, " in different containers (PID namespaces ",
                 first.pid_namespace, " and ", other.pid_namespace, ")");
  }
  return "";
}

std::string hosts_of(const std::vector<HostRecord>& records) {
  std::vector<const HostRecord*> hosts;
  std::string names;
  for (const HostRecord& record : records) {
    const auto same = [&record](const HostRecord* host) { return host->same_host(record); };
    if (std::any_of(hosts.begin(), hosts.end(), same)) continue;
    names += (hosts.empty() ? "" : ", ") + record.host;
    hosts.push_back(&record);
  }
  return hosts.size() == 1 ? str("host ", names) : str(hosts.size(), " hosts: ", names);
}

Place local_place(const std::vector<HostRecord>& records, int rank) {
  Place place{.rank = 0, .size = 0};
  const HostRecord& own = records[static_cast<size_t>(rank)];
  for (size_t peer = 0; peer < records.size(); ++peer) {
    if (!records[peer].same_host(own)) continue;
    if (static_cast<int>(peer) < rank) ++place.rank;
    ++place.size;
  }
  return place;
}

void check_one_transport(const std::vector<HostRecord>& records) {
  for (size_t rank = 1; rank < records.size(); ++rank)
    if (records[rank].transport != records[0].transport)
      throw ConfigError(str("rank 0 joins with transport ", name_of_transport(records[0].transport), ", rank ", rank,
                            " with ", name_of_transport(records[rank].transport),
                            "; give TRIREME_COMM, or the transport in the program, the same value on every rank"));
}

}  // namespace trireme::comm
