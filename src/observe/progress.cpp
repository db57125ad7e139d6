#include "trireme/observe/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <vector>

#include "trireme/base/environment.h"
#include "trireme/base/format.h"

namespace trireme {
namespace {

constexpr auto kRedrawInterval = std::chrono::milliseconds(100);
/// Weight of the past in the smoothed loss: it follows the last 20 steps or so.
constexpr double kSmoothing = 0.95;
constexpr int kWidestBar = 30;
constexpr int kNarrowestBar = 8;

/// The figures of floating point work that are known, in the order of their worth.
std::vector<std::string> compute_parts(const ComputeRate& compute, double tokens_per_s) {
  std::vector<std::string> parts;
  if (const auto rate = compute.tflops_per_rank(tokens_per_s))
    parts.push_back(short_quantity(*rate * 1e12, compute.ranks > 1 ? "FLOP/s/rank" : "FLOP/s"));
  if (const auto mfu = compute.mfu(tokens_per_s)) parts.push_back(formatted("{:.3g} % MFU", *mfu * 100));
  return parts;
}

std::string bar(double fraction, int width) {
  const int done = std::clamp(static_cast<int>(fraction * width), 0, width);
  std::string text = "[";
  for (int i = 0; i < width; ++i) text += i < done ? '=' : i == done && done > 0 ? '>' : ' ';
  return text + "]";
}

std::optional<int> columns_of(int fd) {
  if (!::isatty(fd) || environment("TERM").value_or("dumb") == "dumb") return std::nullopt;
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void write_to(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    // A closed pipe must not end a training run: its log is gone, the metrics file is not.
    if (written < 0 && errno != EINTR) return;
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace

ProgressOutput output_to(int fd) {
  return {.write = [fd](std::string_view text) { write_to(fd, text); },
          .columns = [fd] { return columns_of(fd); },
          .now = [] { return std::chrono::steady_clock::now(); }};
}

std::string short_count(double value) {
  static constexpr const char* kSuffixes[] = {"", "k", "M", "G", "T", "P"};
  size_t power = 0;
  // 999.5 would be printed as 1000: compare with what rounds to three digits.
  for (; std::abs(value) >= 999.5 && power + 1 < std::size(kSuffixes); ++power) value /= 1000;
  const bool whole = power == 0 && value == std::floor(value);
  const int digits = whole || std::abs(value) >= 99.95 ? 0 : std::abs(value) >= 9.995 ? 1 : 2;
  return formatted("{:.{}f}{}", value, digits, kSuffixes[power]);
}

std::string short_quantity(double value, std::string_view unit) {
  const std::string count = short_count(value);
  const bool has_suffix = std::isfinite(value) && std::isalpha(static_cast<unsigned char>(count.back()));
  const std::string_view digits = std::string_view(count).substr(0, count.size() - (has_suffix ? 1 : 0));
  return formatted("{} {}{}", digits, has_suffix ? count.substr(count.size() - 1) : "", unit);
}

std::string short_duration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "--";
  const auto total = static_cast<int64_t>(std::llround(seconds));
  const int64_t hours = total / 3600, minutes = total / 60 % 60, rest = total % 60;
  return hours > 0 ? formatted("{}:{:02}:{:02}", hours, minutes, rest) : formatted("{}:{:02}", minutes, rest);
}

Progress::Progress(const ProgressOptions& options, ProgressOutput output)
    : options_(options), output_(std::move(output)), start_(output_.now()) {
  last_.step = options_.first_step;
}

Progress::~Progress() {
  try {
    finish();
  } catch (...) {  // nobody is left to tell
  }
}

void Progress::update(const ProgressStep& step) {
  last_ = step;
  tokens_ += step.tokens;
  // Bias-corrected, so that the first steps count fully; a loss that is not finite is shown as it is and not averaged
  // in.
  if (std::isfinite(step.loss)) {
    smooth_loss_ = kSmoothing * smooth_loss_ + (1 - kSmoothing) * step.loss;
    smooth_weight_ = kSmoothing * smooth_weight_ + (1 - kSmoothing);
  }
  const bool is_last = step.step >= options_.total_steps;
  if (output_.columns()) {
    const auto now = output_.now();
    if (is_last || !drawn_at_ || now - *drawn_at_ >= kRedrawInterval) draw();
  } else if (is_last || step.step % std::max<int64_t>(options_.plain_every_steps, 1) == 0) {
    output_.write(describe(0) + "\n");
    plain_step_ = step.step;
  }
}

void Progress::note(const std::string& line) {
  const bool was_open = line_open_;
  erase();
  output_.write(line + "\n");
  if (was_open) draw();
}

void Progress::finish() {
  if (finished_) return;
  finished_ = true;
  const bool any_step = last_.step > options_.first_step;
  if (output_.columns()) {
    if (any_step) draw();
    if (line_open_) output_.write("\n");
    line_open_ = false;
  } else if (any_step && plain_step_ != last_.step) {
    output_.write(describe(0) + "\n");
  }
}

void Progress::draw() {
  const auto columns = output_.columns();
  if (!columns) return;
  // Return to the first column, write, clear what is left of a longer line before it.
  output_.write(formatted("\r{}\x1b[K", describe(*columns)));
  line_open_ = true;
  drawn_at_ = output_.now();
}

void Progress::erase() {
  if (line_open_) output_.write("\r\x1b[K");
  line_open_ = false;
}

std::string Progress::describe(int columns) const {
  const double elapsed_s = std::chrono::duration<double>(output_.now() - start_).count();
  const int64_t steps = last_.step - options_.first_step;
  const double fraction =
      options_.total_steps > 0 ? static_cast<double>(last_.step) / static_cast<double>(options_.total_steps) : 0;
  const double loss = std::isfinite(last_.loss) && smooth_weight_ > 0 ? smooth_loss_ / smooth_weight_ : last_.loss;
  const double left_s =
      steps > 0 ? elapsed_s / static_cast<double>(steps) * static_cast<double>(options_.total_steps - last_.step) : -1;

  const std::string head = "step " + std::to_string(last_.step) + "/" + std::to_string(options_.total_steps);
  const double tokens_per_s = elapsed_s > 0 ? static_cast<double>(tokens_) / elapsed_s : 0;
  std::string tail =
      formatted("loss {:.4f}  lr {:.2e}  {} tokens/s", loss, last_.learning_rate, short_count(tokens_per_s));
  const std::string time =
      last_.step >= options_.total_steps ? "  took " + short_duration(elapsed_s) : "  left " + short_duration(left_s);
  for (const auto& part : compute_parts(options_.compute, tokens_per_s)) {
    const size_t size = head.size() + 2 + tail.size() + 2 + part.size() + time.size();
    if (columns <= 0 || size < static_cast<size_t>(columns)) tail += "  " + part;
  }
  tail += time;
  if (columns <= 0) return head + "  " + tail;
  // The last column stays free: some terminals wrap when it is written.
  const int room = columns - 1 - static_cast<int>(head.size() + tail.size()) - 5;
  std::string line = head + "  " + tail;
  if (room >= kNarrowestBar) line = head + " " + bar(fraction, std::min(room, kWidestBar)) + " " + tail;
  return line.substr(0, static_cast<size_t>(std::max(columns - 1, 0)));
}

}  // namespace trireme
