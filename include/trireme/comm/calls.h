// The calls of groups that have begun in this process and not ended.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

struct CallUnderWay {
  std::string group;
  std::vector<int> ranks = {};  ///< in the world: of the group; of a message the two
  int64_t number = 0;           ///< of the group's calls, or of the messages of a pair
  std::string text;             ///< "all_gather #12 (numel 1000, float32) of layers.3 in forward"
  int rank = 0;                 ///< that made it, in the world
  std::chrono::steady_clock::time_point begin = {};
};

/// The calls of all groups of this process, by group. Any thread.
std::vector<CallUnderWay> calls_under_way();

}  // namespace trireme
