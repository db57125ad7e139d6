#include "cli/launch/verdict.h"

#include <string.h>
#include <sys/wait.h>

#include <algorithm>
#include <cctype>
#include <csignal>

#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

bool failed_by_itself(const RankEnd& end) { return end.wait_status != 0 && !end.ended_by_launcher; }

// The first number behind "rank " in `line` that is not `own`.
std::optional<int> other_rank_in(const std::string& line, int own) {
  for (auto at = line.find("rank "); at != std::string::npos; at = line.find("rank ", at + 1)) {
    size_t end = at + 5;
    while (end < line.size() && std::isdigit(static_cast<unsigned char>(line[end]))) ++end;
    if (end == at + 5 || end >= at + 5 + 9) continue;
    const int rank = std::stoi(line.substr(at + 5, end - at - 5));
    if (rank != own) return rank;
  }
  return std::nullopt;
}

bool is_about_a_peer(const std::string& line) {
  // The library's own words: names of error codes as `trireme` prints them, and parts of a CommError's text, which is
  // all that a user's program shows.
  static const std::vector<std::string> kMarks = {
      "PeerLostError",   "TimeoutError", "DivergedError", " gave up group '", " failed while rank ",
      " did not arrive", " died",        " left ",        "did not come"};
  return std::any_of(kMarks.begin(), kMarks.end(),
                     [&](const std::string& mark) { return line.find(mark) != std::string::npos; });
}

const RankEnd* first_failure(const std::vector<RankEnd>& ends) {
  const RankEnd* first = nullptr;
  for (const auto& end : ends) {
    if (failed_by_itself(end) && (!first || end.order < first->order)) first = &end;
  }
  return first;
}

// From the failure that was seen first to the one that caused it, as far as the ranks' own errors tell.
const RankEnd* root_cause(const RankEnd* end, const std::vector<RankEnd>& ends) {
  for (size_t hops = 0; hops < ends.size(); ++hops) {
    const auto peer = blamed_peer(end->rank, end->tail);
    if (!peer || *peer >= static_cast<int>(ends.size()) || !failed_by_itself(ends[*peer])) break;
    end = &ends[*peer];
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

// Of a job in which no rank failed by itself, but perhaps some had to be ended.
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

std::optional<int> blamed_peer(int rank, const std::vector<std::string>& tail) {
  for (auto line = tail.rbegin(); line != tail.rend(); ++line) {
    if (!is_about_a_peer(*line)) continue;
    if (const auto peer = other_rank_in(*line, rank)) return peer;
  }
  return std::nullopt;
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
