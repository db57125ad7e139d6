// The output of one rank: cut into lines, prefixed, and the end of it kept.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::cli {

/// Cuts a stream of bytes into lines, as a terminal would show them: what a carriage return overwrites is dropped.
class LineSplitter {
 public:
  /// A longer line is cut into pieces of this size, so that a rank that never ends its line does not fill the memory.
  static constexpr size_t kMaxLineBytes = 64 * 1024;
  using OnLine = std::function<void(const std::string&)>;  ///< gets the line without its newline

  void feed(std::string_view bytes, const OnLine& on_line);
  /// Hands out a last line that has no newline.
  void finish(const OnLine& on_line);

 private:
  std::string line_;
  bool after_return_ = false;  // a carriage return was seen; the next byte decides what it meant
};

/// A relay of a rank's output: every line with `prefix`, in one piece; without a prefix the bytes as they
/// come.
class LineRelay {
 public:
  explicit LineRelay(std::string prefix) : prefix_(std::move(prefix)) {}
  /// The text to write now; may be empty.
  std::string feed(std::string_view bytes);
  std::string finish();

 private:
  std::string prefix_;
  LineSplitter splitter_;
};

/// The last lines of a stream that say something: not empty ones, nor the frames of libtorch's stacks.
class OutputTail {
 public:
  explicit OutputTail(size_t max_lines) : max_lines_(max_lines) {}
  void feed(std::string_view bytes);
  void finish();
  std::vector<std::string> lines() const { return {lines_.begin(), lines_.end()}; }

 private:
  void keep(const std::string& line);

  size_t max_lines_;
  LineSplitter splitter_;
  std::deque<std::string> lines_;
};

}  // namespace trireme::cli
