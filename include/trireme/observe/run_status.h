// The ranks of this machine at one moment. Each tells of itself to who asks; nothing is measured before.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

/// A call of a group that has begun on a rank and not ended.
struct CallNow {
  std::string group;
  std::vector<int> ranks;  ///< of the group, in the world
  int64_t number = 0;      ///< of the group's calls, and of a pair's messages
  std::string text;        ///< "all_gather #12 (numel 1000, float32) of layers.3 in forward"
  double seconds = 0;      ///< since it began
  bool operator==(const CallNow&) const = default;
};

/// A rank at one moment.
struct RankNow {
  pid_t pid = 0;
  int rank = 0;        ///< in the world
  int ranks = 1;       ///< of the world
  std::string job;     ///< the same text on all ranks of one job
  std::string folder;  ///< in which the run writes; empty: not said
  int64_t step = 0;    ///< optimizer steps so far
  int64_t samples = 0;
  std::optional<double> loss = {};  ///< of the last backward pass on the host
  double samples_per_s = 0;         ///< of all ranks, over the last steps; 0: before two of them
  double tokens_per_s = 0;          ///< the same in tokens; 0: not known
  double seconds_since_step = 0;    ///< or since the training was made
  int64_t device_bytes = 0;         ///< of libtorch's allocator
  std::vector<CallNow> calls = {};  ///< under way
  /// Since the last method of an engine ended; nothing: one runs.
  std::optional<double> seconds_outside = {};
  std::string record = {};  ///< the folder of the run's record; empty: there is none
  bool operator==(const RankNow&) const = default;
};

/// The part of a RankNow that steps change. Any thread may read it while one writes.
class StepCounts {
 public:
  void note_loss(const at::Tensor& loss);
  void note_window(int64_t step, int64_t samples);
  /// 0: not known.
  void set_tokens_per_sample(int64_t tokens) { tokens_per_sample_ = tokens; }
  int64_t tokens_per_sample() const { return tokens_per_sample_; }
  /// Samples of all ranks since the start of training; 0: not known.
  int64_t samples() const;
  void write_to(RankNow& now) const;

 private:
  using Clock = std::chrono::steady_clock;
  std::atomic<int64_t> tokens_per_sample_{0};
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  int64_t step_ = 0;
  int64_t samples_ = 0;
  std::optional<double> loss_;
  double samples_per_s_ = 0;
  bool has_window_ = false;
  Clock::time_point last_ = Clock::now();
};

/// While one lives, this process tells whoever asks what `now` returns, which is called on a thread of its own. Others
/// than this user and root get no answer. A process has one socket for all of them, in Linux's abstract namespace, so
/// that nothing is left behind.
class [[nodiscard]] ToldStatus {
 public:
  /// `rank`, `ranks`, `job`: as RankNow, for who asks a process that cannot answer.
  ToldStatus(int rank, int ranks, const std::string& job, std::function<RankNow()> now);
  ~ToldStatus();
  ToldStatus(const ToldStatus&) = delete;
  ToldStatus& operator=(const ToldStatus&) = delete;

 private:
  const int64_t number_;
};

/// The text that the `ranks` ranks of this process's job share, by what started them: "127.0.0.1:29500", "process 123".
std::string job_of_this_process(int ranks);

/// A process that has a training, as another one sees it.
struct ProcessNow {
  pid_t pid = 0;
  char state = '?';  ///< as in /proc/PID/stat: R, S, D (waits for a disk), T (stopped), …
  int rank = 0;      ///< its first one
  int ranks = 1;
  std::string job;
  int64_t resident_bytes = 0;
  std::vector<RankNow> now = {};  ///< empty: it has not answered
};

/// The processes of this machine that have a training and belong to this user, by job and rank. Asks all at once and
/// waits up to `patience` for the last answer.
std::vector<ProcessNow> processes_now(std::chrono::milliseconds patience);

}  // namespace trireme
