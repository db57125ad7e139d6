// The log of a test.
#pragma once

#include <mutex>
#include <string>

#include "trireme/base/log.h"

namespace trireme {

/// Collects what is logged during its life, by any thread, one line per message: "warning …" or "info …".
class CapturedLog {
 public:
  CapturedLog()
      : former_(set_log_sink([this](LogLevel level, const std::string& message) {
          const std::lock_guard lock(mutex_);
          text_ += (level == LogLevel::kWarning ? "warning " : "info ") + message + "\n";
        })) {}
  ~CapturedLog() { set_log_sink(former_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  const std::string& text() const { return text_; }

 private:
  std::mutex mutex_;
  std::string text_;
  LogSink former_;
};

}  // namespace trireme
