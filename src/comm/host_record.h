// Where a rank runs, as it tells its peers, and what follows from all of them. Pure but for of_this_process().
#pragma once

#include <string>
#include <vector>

#include "comm/call.h"
#include "comm/memory.h"
#include "trireme/comm/world.h"

namespace trireme::comm {

struct HostRecord {
  std::string host;
  std::string boot_id;        ///< one kernel
  std::string pid_namespace;  ///< process ids mean the same
  Transport transport = Transport::kAuto;
  SegmentTicket ticket;  ///< rank 0: the control segment

  std::string text() const;
  /// Throws IoError: a text that no record has.
  static HostRecord parse(const std::string& text);
  static HostRecord of_this_process();
  bool same_host(const HostRecord& other) const { return host == other.host && boot_id == other.boot_id; }
};

/// Why the ranks cannot share memory: names two of them and where they run; empty: they run on one host, in one PID
/// namespace.
std::string obstacle_to_sharing(const std::vector<HostRecord>& records);

/// "host a", "2 hosts: a, b"
std::string hosts_of(const std::vector<HostRecord>& records);

/// The place of `rank` among the ranks of its host.
Place local_place(const std::vector<HostRecord>& records, int rank);

/// Throws ConfigError where ranks were told different transports: both are named.
void check_one_transport(const std::vector<HostRecord>& records);

}  // namespace trireme::comm
