#include "cli/job_view.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/observe/progress.h"

namespace trireme::cli {
namespace {

// A call that has lasted less is not worth a line: it may end in this moment.
constexpr double kWaitsFrom = 0.25;

/// At most so many characters of a line of UTF-8.
std::string first_characters(const std::string& line, int most) {
  size_t at = 0;
  for (int count = 0; at < line.size(); ++at) {
    constexpr int kKind = 0xC0, kContinues = 0x80;
    if ((line[at] & kKind) != kContinues && count++ == most) break;
  }
  return line.substr(0, at);
}

using Jobs = std::map<std::string, std::vector<ProcessNow>>;

std::string state_text(char state) {
  switch (state) {
    case 'T':
    case 't':
      return "stopped";
    case 'D':
      return "waits for a disk";
    case 'Z':
      return "has ended";
    default:
      return "";
  }
}

std::string title_of(const ProcessNow& process) {
  const std::string state = state_text(process.state);
  return str("rank ", process.rank, state.empty() ? "" : " (" + state + ")");
}

std::optional<pid_t> parent_of(pid_t pid) {
  std::ifstream file(str("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("PPid:")) return static_cast<pid_t>(std::atoi(line.c_str() + 5));
  return std::nullopt;
}

bool is_below(pid_t pid, pid_t above) {
  for (std::optional<pid_t> one = pid; one && *one > 1; one = parent_of(*one))
    if (*one == above) return true;
  return false;
}

bool is_named(const ProcessNow& process, const std::string& run) {
  if (process.job == run) return true;
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(run.data(), run.data() + run.size(), pid);
  if (error == std::errc() && end == run.data() + run.size()) return is_below(process.pid, pid);
  std::error_code ignored;
  return std::ranges::any_of(process.now, [&](const RankNow& now) {
    return std::ranges::any_of(std::array{now.folder, now.record}, [&](const std::string& folder) {
      return !folder.empty() && std::filesystem::equivalent(folder, run, ignored);
    });
  });
}

std::string list_of(const Jobs& jobs) {
  std::string text;
  for (const auto& [name, processes] : jobs) {
    text += str("\n  ", name, ": ", processes.size(), processes.size() == 1 ? " process" : " processes",
                ", the first is ", processes.front().pid);
    for (const RankNow& now : processes.front().now)
      for (const std::string& folder : {now.folder, now.record})
        if (!folder.empty()) text += ", writes to " + folder;
  }
  return text;
}

/// Whether `rank` of the job is in this call.
bool is_in(const std::vector<ProcessNow>& job, int rank, const CallNow& call) {
  for (const ProcessNow& process : job)
    for (const RankNow& now : process.now) {
      if (now.rank != rank) continue;
      return std::ranges::any_of(now.calls, [&call](const CallNow& other) {
        return other.group == call.group && other.number == call.number;
      });
    }
  return false;
}

const CallNow* longest_call(const RankNow& now) {
  const auto found = std::ranges::max_element(now.calls, {}, &CallNow::seconds);
  return found == now.calls.end() || found->seconds < kWaitsFrom ? nullptr : &*found;
}

std::string doing(const ProcessNow& process, const RankNow* now) {
  if (const std::string state = state_text(process.state); !state.empty()) return state;
  if (now == nullptr) return "does not answer";
  if (const CallNow* call = longest_call(*now)) return formatted("{:.1f} s in {}", call->seconds, call->text);
  const char* const state = process.state == 'S' ? "sleeps" : "computes";  // of the main thread
  if (now->seconds_outside && *now->seconds_outside >= kWaitsFrom)
    return formatted("{}, outside the engine since {:.1f} s", state, *now->seconds_outside);
  return "computes";
}

std::string row_of(const ProcessNow& process, const RankNow* now) {
  const std::string loss = now != nullptr && now->loss ? formatted("{:.4g}", *now->loss) : "–";
  const std::string step = now != nullptr ? str(now->step) : "–";
  const std::string memory = size_text(static_cast<double>(process.resident_bytes));
  std::string device = "";
  if (now != nullptr && now->device_bytes > 0) device = " + " + size_text(static_cast<double>(now->device_bytes));
  return formatted("{:>4}  {:>8}  {:>8}  {:>9}  {:>10}  {}", now != nullptr ? now->rank : process.rank, process.pid,
                   step, loss, memory + device, doing(process, now));
}

std::string header_of(const std::vector<ProcessNow>& job) {
  const RankNow* latest = nullptr;
  int64_t bytes = 0;
  size_t ranks = 0;
  for (const ProcessNow& process : job) {
    bytes += process.resident_bytes;
    ranks += std::max<size_t>(process.now.size(), 1);
    for (const RankNow& now : process.now)
      if (latest == nullptr || now.step > latest->step) latest = &now;
  }
  std::string text = str("job ", job.front().job, ": ", ranks, " of ", job.front().ranks,
                         job.front().ranks == 1 ? " rank" : " ranks", " here");
  if (latest != nullptr) {
    text += str(", step ", latest->step);
    if (latest->samples_per_s > 0) text += formatted(", {:.3g} samples/s", latest->samples_per_s);
    if (latest->tokens_per_s > 0) text += ", " + short_quantity(latest->tokens_per_s, "tokens/s");
    text += formatted(", last step {} ago", short_duration(latest->seconds_since_step));
  }
  return text + ", memory " + size_text(static_cast<double>(bytes));
}

}  // namespace

std::string late_ranks(const std::vector<ProcessNow>& job, const RankNow& waiting, const CallNow& call) {
  std::string text;
  for (const int rank : call.ranks) {
    if (rank == waiting.rank || is_in(job, rank, call)) continue;
    const auto process = std::ranges::find_if(job, [rank](const ProcessNow& one) {
      return one.rank == rank || std::ranges::any_of(one.now, [rank](const RankNow& now) { return now.rank == rank; });
    });
    text += (text.empty() ? "" : ", ");
    text += process == job.end() ? str("rank ", rank, " (not on this machine)") : title_of(*process);
  }
  return text;
}

std::vector<ProcessNow> job_of(std::vector<ProcessNow> processes, const std::string& run) {
  Jobs jobs;
  for (ProcessNow& process : processes) jobs[process.job].push_back(std::move(process));
  if (jobs.empty())
    throw StateError("no process of this user trains on this machine now; a job is seen once its engine is made");
  if (run.empty()) {
    if (jobs.size() == 1) return jobs.begin()->second;
    throw StateError(str("there are ", jobs.size(), " jobs; name one, or a process of it:", list_of(jobs)));
  }
  for (auto& [name, job] : jobs)
    if (std::ranges::any_of(job, [&](const ProcessNow& process) { return is_named(process, run); })) return job;
  throw StateError(str("'", run, "' names no running job; there are:", list_of(jobs)));
}

std::string text_of(const std::vector<ProcessNow>& job, int columns) {
  std::vector<std::string> lines = {
      header_of(job), "",
      formatted("{:>4}  {:>8}  {:>8}  {:>9}  {:>10}  {}", "rank", "process", "step", "loss", "memory", "now")};
  std::set<std::string> waits;
  for (const ProcessNow& process : job) {
    if (process.now.empty()) lines.push_back(row_of(process, nullptr));
    for (const RankNow& now : process.now) {
      lines.push_back(row_of(process, &now));
      const CallNow* call = longest_call(now);
      if (call == nullptr) continue;
      const std::string late = late_ranks(job, now, *call);
      if (!late.empty()) waits.insert(str("rank ", now.rank, " waits for ", late, ": ", call->text));
    }
  }
  if (!waits.empty()) lines.emplace_back();
  lines.insert(lines.end(), waits.begin(), waits.end());
  std::string text;
  for (const std::string& line : lines) text += without_trailing_spaces(first_characters(line, columns)) + "\n";
  return text;
}

}  // namespace trireme::cli
