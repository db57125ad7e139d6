// Which ranks a group has, and which of them this one is.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace trireme::comm {

/// Which rank of how many.
struct Place {
  int rank = 0;
  int size = 1;
};

/// A wait that has been long looks this often for a peer that is stopped: it costs a read of a file per peer.
inline constexpr std::chrono::seconds kLookForStoppedEvery{1};

struct GroupInfo {
  std::string name;
  Place place;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// So long a wait is silent about a peer whose process is stopped or, where ranks share no memory, that is late.
  std::chrono::milliseconds warn_after = std::chrono::minutes(1);
  /// By rank: its rank in the world. Empty where that is the same for all.
  std::vector<int> world_ranks = {};

  int world_rank(int rank) const { return world_ranks.empty() ? rank : world_ranks[static_cast<size_t>(rank)]; }
  /// "rank 1", or, where the world numbers its ranks otherwise, "rank 1 (world rank 5)". A note stands with it:
  /// "rank 1 (world rank 5, pid 123)".
  std::string title(int rank, const std::string& note = "") const;
  /// The group named `name` of this group's ranks `members`, of which this rank is one.
  GroupInfo part(const std::vector<int>& members, const std::string& name) const;
};

}  // namespace trireme::comm
