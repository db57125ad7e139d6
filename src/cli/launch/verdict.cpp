#include "cli/launch/verdict.h"

#include <string.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>

#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

bool failed_by_itself(const RankEnd& end) { return end.wait_status != 0 && !end.ended_by_launcher; }

const RankEnd* first_failure(const std::vector<RankEnd>& ends) {
  const RankEnd* first = nullptr;
  for (const auto& end : ends) {
    if (failed_by_itself(end) && (!first || end.order < first->order)) first = &end;
  }
  return first;
}

// From the failure that was seen first to the one that caused it, as far as the ranks have told.
const RankEnd* root_cause(const RankEnd* end, const std::vector<RankEnd>& ends) {
  for (size_t hops = 0; hops < ends.size() && end->peer_failure; ++hops) {
    const auto [code, peer] = *end->peer_failure;
    if (code == ErrorCode::kDiverged || static_cast<size_t>(peer) >= ends.size() || !failed_by_itself(ends[peer]))
      break;
    end = &ends[peer];
  }
  return end;
}

std::string describe(const RankEnd& end) {
  if (!WIFSIGNALED(end.wait_status)) return str("exited with code ", exit_code_of(end.wait_status));
  const int signal = WTERMSIG(end.wait_status);
  std::string text = "was killed by " + signal_name(signal);
  if (signal == SIGKILL) text += " (not by the launcher; the kernel does this when memory runs out, see `dmesg`)";
  if (WCOREDUMP(end.wait_status)) text += " (core dumped)";
  return text;
}

std::string describe_other(const RankEnd& end) {
  if (end.ended_by_launcher)
    return str("rank ", end.rank, end.was_stopped ? " (it was stopped)" : "", " ended by the launcher");
  if (WIFSIGNALED(end.wait_status))
    return str("rank ", end.rank, " killed by ", signal_name(WTERMSIG(end.wait_status)));
  return str("rank ", end.rank, " exited with code ", exit_code_of(end.wait_status));
}

// Ranks that went on although the user, or another rank's failure, had the launcher end the job.
std::string report_unfinished(const std::vector<RankEnd>& ends, const std::string& name, int forwarded) {
  std::string report;
  for (const auto& end : ends) {
    if (end.wait_status == 0 || !end.ended_by_launcher) continue;
    const bool killed = WIFSIGNALED(end.wait_status);
    report += str(name, ": ", forwarded == 0 ? "" : str("after ", signal_name(forwarded), ", "), "rank ", end.rank,
                  " did not end by itself; the launcher ended it (",
                  killed ? signal_name(WTERMSIG(end.wait_status)) : str("code ", exit_code_of(end.wait_status)), ")\n");
  }
  return report;
}

// The verdict of a job in which no rank failed by itself, but perhaps some had to be ended.
Verdict judge_unfinished(const std::vector<RankEnd>& ends, const std::string& name, int forwarded) {
  const auto ended = std::find_if(ends.begin(), ends.end(), [](const RankEnd& end) { return end.wait_status != 0; });
  if (ended == ends.end()) return {};
  return {forwarded != 0 ? 128 + forwarded : exit_code_of(ended->wait_status),
          report_unfinished(ends, name, forwarded)};
}

}  // namespace

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name ? str("SIG", name) : str("signal ", signal);
}

int exit_code_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

Verdict judge(const std::vector<RankEnd>& ends, const std::string& name, int forwarded) {
  const RankEnd* first = first_failure(ends);
  if (!first) return judge_unfinished(ends, name, forwarded);
  const RankEnd* cause = root_cause(first, ends);
  if (forwarded != 0 && exit_code_of(cause->wait_status) == 128 + forwarded)
    return {128 + forwarded, report_unfinished(ends, name, forwarded)};
  std::string others;
  for (const auto& end : ends) {
    if (&end != cause && (end.wait_status != 0 || end.was_stopped))
      others += str(others.empty() ? "" : ", ", describe_other(end));
  }
  Verdict verdict{exit_code_of(cause->wait_status), ""};
  if (!others.empty()) verdict.report += str(name, ": after that: ", others, "\n");
  verdict.report += str(name, ": rank ", cause->rank, " ", describe(*cause));
  verdict.report += cause->tail.empty() ? "; it wrote nothing\n" : "; its last lines:\n";
  for (const auto& line : cause->tail) verdict.report += str("    ", line, "\n");
  return verdict;
}

}  // namespace trireme::cli
