#include "trireme/observe/comms_log.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/log.h"
#include "trireme/base/suggest.h"

namespace trireme {
namespace {

constexpr double kBitsPerByte = 8;
constexpr double kGiga = 1e9;

/// Whether `operation` is `kind` or torch.distributed's name of a form of it: "all_gather_into_tensor" of "all_gather".
bool is_kind_of(std::string_view operation, std::string_view kind) {
  if (!operation.starts_with(kind)) return false;
  const std::string_view rest = operation.substr(kind.size());
  return rest.empty() || rest == "_tensor" || rest == "_into_tensor" || rest == "_single" || rest == "_coalesced";
}

double bus_factor(const CommsLogEntry& entry) {
  const double links = entry.group_size > 0 ? static_cast<double>(entry.group_size - 1) / entry.group_size : 0;
  if (entry.operation == "all_reduce") return 2 * links;
  // torch.distributed's "all_gather_into_tensor" is an all-gather, too.
  for (const char* const one : {"all_gather", "reduce_scatter", "all_to_all"})
    if (is_kind_of(entry.operation, one)) return links;
  return 1;
}

/// The calls of groups, and "reduce", which torch.distributed alone has.
const std::vector<std::string>& operations() {
  static const std::vector<std::string> names{"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all",
                                              "gather",     "scatter",        "reduce",     "barrier",   "send",
                                              "recv",       "share",          "split"};
  return names;
}

bool is_counted(const CommsLoggerOptions& options, const Notice& call) {
  const std::string_view operation = call.operation.empty() ? call.name : call.operation;
  return options.prof_all || std::ranges::any_of(options.prof_ops, [operation](const std::string& asked) {
           return is_kind_of(operation, asked) || is_kind_of(asked, operation);
         });
}

std::string line_of(const Notice& call, bool debug) {
  const double ms = call.duration().count() * 1e3;
  std::string text = formatted("comm: {} | {} | {:.3f} ms", call.name, size_text(static_cast<double>(call.bytes)), ms);
  if (!debug) return text;
  if (!call.caller.empty()) text += formatted(" | in {}", call.caller);
  if (!call.subject.empty()) text += formatted(" | of {}", call.subject);
  return text + formatted(" | group '{}', {} ranks", call.group, call.group_size);
}

}  // namespace

double CommsLogEntry::algorithm_gbps() const {
  if (!(seconds > 0)) return 0;
  return kBitsPerByte * static_cast<double>(bytes) * static_cast<double>(count) / seconds / kGiga;
}

double CommsLogEntry::bus_gbps() const { return algorithm_gbps() * bus_factor(*this); }

void check_operations(const CommsLoggerOptions& options, const std::string& key) {
  const std::vector<std::string>& known = operations();
  for (const std::string& asked : options.prof_ops) {
    if (std::ranges::any_of(known, [&](const std::string& kind) { return is_kind_of(asked, kind); })) continue;
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "\"" : ", \"") + name + "\"";
    throw ConfigError(str("`", key, "` has \"", asked, "\", which is no operation, so nothing would be counted for it.",
                          did_you_mean(asked, known), " There are ", names,
                          ", and torch.distributed's forms of these, as \"all_gather_into_tensor\"; a call that has a "
                          "`log_name` is counted by its operation"));
  }
}

void CommsLog::hear(const Notice& notice) noexcept {
  if (notice.kind != Notice::Kind::kCollective) return tell_lines();
  if (notice.caller == kLogSummary) return;
  const double seconds = notice.duration().count();
  const std::lock_guard lock(mutex_);
  if (!is_counted(options_, notice)) return;
  Sum& sum = sums_[{std::string(notice.name), {notice.bytes, notice.group_size}}];
  sum.min_seconds = sum.count == 0 ? seconds : std::min(sum.min_seconds, seconds);
  sum.seconds += seconds;
  ++sum.count;
  if (options_.verbose) lines_.push_back(line_of(notice, options_.debug));
}

// A group tells a call's end under its locks, and a sink may wait for a thread that wants them. So lines are told when
// a wait or a method ends, which holds none.
void CommsLog::tell_lines() {
  std::vector<std::string> lines;
  {
    const std::lock_guard lock(mutex_);
    lines.swap(lines_);
  }
  for (const std::string& line : lines) log(LogLevel::kInfo, line);
}

void CommsLog::set_options(const CommsLoggerOptions& options) {
  const std::lock_guard lock(mutex_);
  options_ = options;
}

CommsLoggerOptions CommsLog::options() const {
  const std::lock_guard lock(mutex_);
  return options_;
}

std::vector<CommsLogEntry> CommsLog::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<CommsLogEntry> entries;
  for (const auto& [key, sum] : sums_)
    entries.push_back({.operation = key.first,
                       .bytes = key.second.first,
                       .group_size = key.second.second,
                       .count = sum.count,
                       .seconds = sum.seconds,
                       .min_seconds = sum.min_seconds});
  return entries;
}

void CommsLog::clear() {
  const std::lock_guard lock(mutex_);
  sums_.clear();
}

std::string CommsLog::table() const {
  std::string text = formatted("{:<20}{:>14}{:>7}{:>9}{:>20}{:>18}{:>15}{:>15}\n", "operation", "size", "ranks",
                               "count", "total latency (ms)", "avg latency (ms)", "algbw (Gbps)", "busbw (Gbps)");
  std::string operation;
  for (const CommsLogEntry& entry : entries()) {
    if (entry.operation != operation) text += (operation = entry.operation) + "\n";
    text += formatted("{:<20}{:>14}{:>7}{:>9}{:>20.2f}{:>18.3f}{:>15.2f}{:>15.2f}\n", "",
                      size_text(static_cast<double>(entry.bytes)), entry.group_size, entry.count, entry.seconds * 1e3,
                      entry.seconds * 1e3 / static_cast<double>(entry.count), entry.algorithm_gbps(), entry.bus_gbps());
  }
  return text;
}

}  // namespace trireme
