#include "cli/launch/line_relay.h"

namespace trireme::cli {

void LineSplitter::feed(std::string_view bytes, const OnLine& on_line) {
  for (const char byte : bytes) {
    if (byte == '\n') {
      on_line(line_);
      line_.clear();
      after_return_ = false;
      continue;
    }
    if (after_return_) line_.clear();
    after_return_ = byte == '\r';
    if (after_return_) continue;
    line_ += byte;
    if (line_.size() < kMaxLineBytes) continue;
    on_line(line_);
    line_.clear();
  }
}

void LineSplitter::finish(const OnLine& on_line) {
  if (!line_.empty()) on_line(line_);
  line_.clear();
  after_return_ = false;
}

std::string LineRelay::feed(std::string_view bytes) {
  if (prefix_.empty()) return std::string(bytes);
  std::string text;
  splitter_.feed(bytes, [&](const std::string& line) { text += prefix_ + line + '\n'; });
  return text;
}

std::string LineRelay::finish() {
  std::string text;
  splitter_.finish([&](const std::string& line) { text += prefix_ + line + '\n'; });
  return text;
}

void OutputTail::feed(std::string_view bytes) {
  splitter_.feed(bytes, [this](const std::string& line) { keep(line); });
}

void OutputTail::finish() {
  splitter_.finish([this](const std::string& line) { keep(line); });
}

void OutputTail::keep(const std::string& line) {
  constexpr size_t kShownBytes = 2000;
  // libtorch ends what() with a stack; its dozens of lines would push out the one that says what happened.
  if (line.empty() || line.starts_with("frame #")) return;
  lines_.push_back(line.size() <= kShownBytes ? line : line.substr(0, kShownBytes) + " …");
  if (lines_.size() > max_lines_) lines_.pop_front();
}

}  // namespace trireme::cli
