#include "cli/launch/verdict.h"

#include <string.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <sstream>

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
  if (signal == SIGKILL)
    text +=
        " (not by the launcher; the kernel does this when memory runs out, see `dmesg`: then "
        "lower the micro-batch, raise zero_optimization.stage, or start fewer ranks)";
  if (WCOREDUMP(end.wait_status)) text += " (core dumped)";
  return text;
}

// "rank 1", "ranks 0, 2".
std::string named(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const int rank : ranks) text += str(rank == ranks.front() ? "" : ", ", rank);
  return text;
}

std::string indented(const std::string& text) {
  std::istringstream lines(text);
  std::string result;
  for (std::string line; std::getline(lines, line);) result += str("    ", line, "\n");
  return result;
}

// Each text once that ranks have left to the launcher, with the ranks whose it is; that of `cause` last.
std::string report_refusals(const std::vector<RankEnd>& ends, const RankEnd& cause, const std::string& name) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (const auto& end : ends)
    if (!end.refusal.empty()) ranks_of[end.refusal].push_back(end.rank);
  const auto report_of = [&](const std::string& refusal) {
    return str(name, ": ", named(ranks_of[refusal]), " ended with an error:\n", indented(refusal));
  };
  std::string report;
  for (const auto& [refusal, ranks] : ranks_of)
    if (refusal != cause.refusal) report += report_of(refusal);
  return cause.refusal.empty() ? report : report + report_of(cause.refusal);
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
    const bool is_told = !end.refusal.empty() || (!cause->refusal.empty() && end.ended_by_launcher && !end.was_stopped);
    if (&end != cause && !is_told && (end.wait_status != 0 || end.was_stopped))
      others += str(others.empty() ? "" : ", ", describe_other(end));
  }
  Verdict verdict{exit_code_of(cause->wait_status), ""};
  if (!others.empty()) verdict.report += str(name, ": after that: ", others, "\n");
  verdict.report += report_refusals(ends, *cause, name);
  if (!cause->refusal.empty()) return verdict;
  verdict.report += str(name, ": rank ", cause->rank, " ", describe(*cause));
  verdict.report += cause->tail.empty() ? "; it wrote nothing\n" : "; its last lines:\n";
  for (const auto& line : cause->tail) verdict.report += str("    ", line, "\n");
  return verdict;
}

}  // namespace trireme::cli
