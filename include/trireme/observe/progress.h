// A progress bar on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "trireme/observe/compute_rate.h"

namespace trireme {

/// Where progress goes; replaced in tests.
struct ProgressOutput {
  std::function<void(std::string_view)> write;
  /// Columns of the terminal now; nullopt: no terminal, plain lines.
  std::function<std::optional<int>()> columns;
  std::function<std::chrono::steady_clock::time_point()> now;
};

/// Output to file descriptor `fd` (2: stderr). A terminal named "dumb" counts as none.
ProgressOutput output_to(int fd);

/// Options of a Progress.
struct ProgressOptions {
  int64_t total_steps = 0;
  int64_t first_step = 0;          ///< steps done before: the rate and the remaining time count from here
  int64_t plain_every_steps = 10;  ///< without a terminal: a line every so many steps, and one for the last
  ComputeRate compute = {};        ///< shown behind the tokens per second where the line has room
};

/// The figures of one step.
struct ProgressStep {
  int64_t step = 0;  ///< done, this one included
  double loss = 0;
  double learning_rate = 0;
  int64_t tokens = 0;  ///< of this step, all ranks
};

/// Shows step, smoothed loss, learning rate, tokens per second of all ranks, floating point work per second of each
/// rank with its MFU, and the remaining time.
///
/// On a terminal one line is redrawn at most 10 times per second; it never wraps. Elsewhere no control character is
/// written. Not thread-safe.
class Progress {
 public:
  Progress(const ProgressOptions& options, ProgressOutput output);
  /// Ends an open line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(const ProgressStep& step);
  /// Writes `line` above the bar: a message, a validation loss, a checkpoint.
  void note(const std::string& line);
  /// Draws the last state and ends the line; also after an interruption. Idempotent.
  void finish();

 private:
  std::string describe(int columns) const;
  void draw();
  void erase();

  ProgressOptions options_;
  ProgressOutput output_;
  std::chrono::steady_clock::time_point start_;
  std::optional<std::chrono::steady_clock::time_point> drawn_at_;
  ProgressStep last_;
  int64_t tokens_ = 0;
  double smooth_loss_ = 0;
  double smooth_weight_ = 0;
  int64_t plain_step_ = -1;  ///< the last step that got a plain line
  bool line_open_ = false;
  bool finished_ = false;
};

/// 12345 -> "12.3k"; 3 digits, suffixes k M G T P.
std::string short_count(double value);
/// 158e9, "FLOP/s" -> "158 GFLOP/s".
std::string short_quantity(double value, std::string_view unit);
/// 3725 -> "1:02:05"; 65 -> "1:05".
std::string short_duration(double seconds);

}  // namespace trireme
