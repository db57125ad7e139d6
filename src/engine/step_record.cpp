#include "engine/step_record.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/observe/report.h"

namespace trireme {
namespace {

// The report is read and written as a whole, so it is written seldom: at most this part of the time goes into it.
constexpr double kReportShare = 0.005;

struct Folders {
  std::mutex mutex;
  std::set<std::filesystem::path> open;  // guarded by mutex
};

// For ever: an engine may end with the process.
Folders& folders() {
  static auto* const made = new Folders;
  return *made;
}

IoError unwritable(const std::filesystem::path& folder, const std::string& why) {
  return IoError(str("`trireme.record` is \"", folder.string(), "\": ", why,
                     "; name a folder that rank 0 can write, or leave the key and TRIREME_RECORD out"));
}

/// Makes the folder. Its one name: symbolic links may give it others.
std::filesystem::path claimed(const std::filesystem::path& folder) {
  std::filesystem::path whole;
  try {
    posix_file_system().create_directories(folder);
    whole = std::filesystem::canonical(folder);
  } catch (const IoError& error) {
    throw unwritable(folder, error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    throw unwritable(folder, error.code().message());
  }
  Folders& all = folders();
  const std::lock_guard lock(all.mutex);
  if (!all.open.insert(whole).second)
    throw ConfigError(str("`trireme.record` is \"", folder.string(),
                          "\", where another engine of this process writes its record: name another folder, or end "
                          "the other engine by destroy()"));
  return whole;
}

void release(const std::filesystem::path& folder) {
  Folders& all = folders();
  const std::lock_guard lock(all.mutex);
  all.open.erase(folder);
}

}  // namespace

bool StepRecord::is_taken(const std::filesystem::path& folder) {
  std::error_code none;
  const std::filesystem::path whole = std::filesystem::canonical(folder, none);
  Folders& all = folders();
  const std::lock_guard lock(all.mutex);
  return all.open.contains(whole);
}

StepRecord::StepRecord(const std::filesystem::path& folder)
    : folder_(claimed(folder)), path_(folder_ / "metrics.jsonl") {
  try {
    const MetricsWriter probe(path_, std::numeric_limits<int64_t>::max());
  } catch (const IoError& error) {
    release(folder_);
    throw unwritable(folder, error.what());
  }
}

StepRecord::~StepRecord() { end(std::uncaught_exceptions() > 0 ? "an error of the program" : "finished"); }

template <class Work>
void StepRecord::try_to(const Work& work) noexcept {
  try {
    work();
  } catch (const std::exception& error) {
    if (!std::exchange(has_failed_, true))
      log(LogLevel::kWarning,
          str("`trireme.record`: the record lacks what could not be written, and training goes on: ", error.what()));
  }
}

void StepRecord::open(int64_t first_step) {
  FileSystem& files = posix_file_system();
  if (first_step == 0 && files.exists(path_) && files.size(path_) > 0)
    files.rename(path_, folder_ / "metrics.before.jsonl");
  metrics_.emplace(path_, first_step);
  info_.first_step = first_step;
  metrics_->run(info_);
}

void StepRecord::step(StepMetrics metrics, int64_t tokens_of_step) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - std::exchange(step_begin_, now)).count();
  metrics.step_ms = 1e3 * seconds;
  metrics.tokens_per_s = static_cast<double>(tokens_of_step) / seconds;
  step_ = metrics.step;
  try_to([&] {
    if (!metrics_) open(metrics.step - 1);
    metrics_->step(metrics);
    if (now < report_due_) return;
    write_report(path_, folder_ / "report.html");
    const auto took = Clock::now() - now;
    report_due_ = now + std::max<Clock::duration>(std::chrono::seconds(10),
                                                  std::chrono::duration_cast<Clock::duration>(took / kReportShare));
  });
}

void StepRecord::checkpoint(const CheckpointEvent& event) {
  step_begin_ = Clock::now();  // what is not training does not count as a slow step
  try_to([&] {
    if (metrics_) metrics_->checkpoint(event);
  });
}

void StepRecord::end(const std::string& reason) noexcept {
  if (std::exchange(has_ended_, true)) return;
  try_to([&] {
    release(folder_);
    if (!metrics_) return;
    metrics_->end({.step = step_,
                   .reason = reason,
                   .seconds = std::chrono::duration<double>(Clock::now() - begin_).count(),
                   .peak_memory_bytes_of_rank = {},
                   .peak_resident_bytes_of_rank = {peak_resident_bytes()}});
    write_report(path_, folder_ / "report.html");
  });
}

}  // namespace trireme
