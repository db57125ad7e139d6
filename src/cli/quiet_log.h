// Silence of the log for the time of a check whose messages come once more, from the ranks or from a second reading.
#pragma once

#include <string>
#include <utility>

#include "trireme/base/log.h"

namespace trireme::cli {

class QuietLog {
 public:
  QuietLog() : before_(set_log_sink([](LogLevel, const std::string&) {})) {}
  ~QuietLog() { set_log_sink(std::move(before_)); }
  QuietLog(const QuietLog&) = delete;
  QuietLog& operator=(const QuietLog&) = delete;

 private:
  LogSink before_;
};

}  // namespace trireme::cli
