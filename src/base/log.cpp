#include "trireme/base/log.h"

#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>

namespace trireme {
namespace {

void write_to_stderr(LogLevel level, const std::string& message) {
  if (level < LogLevel::kWarning) return;
  std::fprintf(stderr, "trireme: %s%s\n", level == LogLevel::kError ? "error: " : "warning: ", message.c_str());
}

struct Sink {
  std::mutex mutex;
  std::shared_ptr<LogSink> current = std::make_shared<LogSink>(write_to_stderr);  // guarded by mutex
};

// One per process, like stderr itself: messages come from places that no engine owns (an allocator, a destructor).
Sink& sink() {
  static Sink instance;
  return instance;
}

}  // namespace

LogSink set_log_sink(LogSink next) {
  auto fresh = std::make_shared<LogSink>(std::move(next));
  std::lock_guard lock(sink().mutex);
  std::swap(sink().current, fresh);
  return *fresh;
}

void log(LogLevel level, const std::string& message) {
  std::shared_ptr<LogSink> target;
  {
    std::lock_guard lock(sink().mutex);
    target = sink().current;
  }
  if (*target) (*target)(level, message);
}

}  // namespace trireme
