// Ranks do local work that may fail and then agree: it succeeded everywhere, or every rank throws the same error.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

/// Runs `work` and returns what every rank's returned, by rank. Collective.
///
/// Requires  `work` issues no collective.
/// Throws    on every rank, when `work` threw on any: the error of the lowest such rank, with its type and code.
std::vector<std::string> gather_or_throw(Group& group, const std::function<std::string()>& work);

/// As gather_or_throw, where nothing needs to be exchanged.
void all_or_throw(Group& group, const std::function<void()>& work);

/// Runs `work` on rank 0 and returns its text everywhere; throws as gather_or_throw.
std::string broadcast_or_throw(Group& group, const std::function<std::string()>& work);

/// Runs `work` on every rank and hands the texts to `take` on rank 0, by ascending rank. Rank 0 holds one text at a
/// time.
/// Throws as gather_or_throw, also where `take` threw.
void collect_or_throw(Group& group, const std::function<std::string()>& work,
                      const std::function<void(int rank, const std::string& text)>& take);

/// Runs `work` on rank 0 once for each rank and sends that rank the text. Rank 0 holds one text at a time.
/// Requires  `work` throws nothing except when memory runs out.
std::string distribute(Group& group, const std::function<std::string(int rank)>& work);

}  // namespace trireme
