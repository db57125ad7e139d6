// A running job as text: `trireme top`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "trireme/observe/run_status.h"

namespace trireme::cli {

/// A process that others wait for, and why it is late as far as that is known: "rank 2 (stopped)".
std::string late_ranks(const std::vector<ProcessNow>& job, const RankNow& waiting, const CallNow& call);

/// The processes of the one job that `run` names: a process id of a rank, or of a program above one, the folder of a
/// run, or the job's name as the table shows it. Empty `run`: the only job there is.
///
/// Throws    StateError: there is none, or several and `run` is empty; they are listed.
std::vector<ProcessNow> job_of(std::vector<ProcessNow> processes, const std::string& run);

/// A header and a line for each rank, then who waits for whom; each line at most `columns` wide.
std::string text_of(const std::vector<ProcessNow>& job, int columns);

}  // namespace trireme::cli
