// Where messages go. The library itself never prints: it writes to this sink.
#pragma once

#include <functional>
#include <string>

namespace trireme {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

using LogSink = std::function<void(LogLevel, const std::string&)>;

/// Replaces the process's sink and returns the former one. The default writes warnings and errors to stderr.
/// Thread-safe; a sink may be called from several threads at once.
LogSink set_log_sink(LogSink sink);

/// Hands `message` to the sink in force. Thread-safe.
void log(LogLevel level, const std::string& message);

}  // namespace trireme
