// Which slots of which hosts a launch uses. Pure: text in, values out.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace trireme::cli {

/// A host and the slots of it that are used; one rank runs on each slot.
struct HostSlots {
  std::string host;
  std::vector<int> slots;  ///< ascending
  bool operator==(const HostSlots&) const = default;
};

/// Reads `host slots=N` lines; blank lines and # comments are skipped. Hosts keep the order of the file.
///
/// Throws    ConfigError: a line of another form, a host that stands twice, more than 1024 slots on one or 20,000
///           hosts, no host at all; with `origin` and the line number.
std::vector<HostSlots> parse_hostfile(std::string_view text, const std::string& origin);

/// Keeps, or with `exclude` drops, what a `host:0,2@other` text names; a host without slots means all of its slots.
/// An empty text keeps everything; hosts without a slot left are dropped.
///
/// Throws    ConfigError: both texts are given, an unknown host or slot, a malformed text, nothing is left.
std::vector<HostSlots> select_slots(const std::vector<HostSlots>& pool, const std::string& include,
                                    const std::string& exclude);

}  // namespace trireme::cli
