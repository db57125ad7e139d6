// Counts and times of the calls of groups, by operation and size.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/notices.h"
#include "trireme/observe/options.h"

namespace trireme {

/// The calls of one operation with one size of tensor, over groups of one size.
struct CommsLogEntry {
  std::string operation;
  int64_t bytes = 0;  ///< of the whole tensor that is reduced, gathered or sent
  int group_size = 0;
  int64_t count = 0;
  double seconds = 0;      ///< of all calls, each from its begin on this rank to its end, so with the wait for peers
  double min_seconds = 0;  ///< of one call

  /// 10^9 bits per second of the mean call: the tensor's size over the time.
  double algorithm_gbps() const;
  /// The same times what the operation moves over each link for a byte of the tensor: 2 (n-1)/n of an all-reduce,
  /// (n-1)/n of a gather, reduction or exchange over n ranks, else 1. Source: NCCL's tests, "Performance reported".
  double bus_gbps() const;
};

/// Throws    ConfigError: a name of `prof_ops` is no operation, so that nothing would be counted for it; `key` names
///           it.
void check_operations(const CommsLoggerOptions& options, const std::string& key);

/// The method by which ranks compare their logs (CallerScope): calls inside of it are not counted.
inline constexpr const char* kLogSummary = "log_summary";

/// Any thread.
class CommsLog final : public NoticeListener {
 public:
  explicit CommsLog(CommsLoggerOptions options) : options_(std::move(options)) {}

  void hear(const Notice& notice) noexcept override;
  /// Changes what is counted from now on.
  void set_options(const CommsLoggerOptions& options);
  CommsLoggerOptions options() const;
  /// Sorted by operation, then by size.
  std::vector<CommsLogEntry> entries() const;
  /// Forgets all calls.
  void clear();
  /// A table: a line for each operation, and below it one for each size.
  std::string table() const;

 private:
  struct Sum {
    int64_t count = 0;
    double seconds = 0;
    double min_seconds = 0;
  };
  using Key = std::pair<std::string, std::pair<int64_t, int>>;  // operation, bytes, ranks

  void tell_lines();

  mutable std::mutex mutex_;
  CommsLoggerOptions options_;      // guarded by mutex_
  std::map<Key, Sum> sums_;         // guarded by mutex_
  std::vector<std::string> lines_;  // guarded by mutex_: of verbose calls, not yet told
};

}  // namespace trireme
