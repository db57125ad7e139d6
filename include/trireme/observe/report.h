// The HTML report of a run: one self-contained file, made from metrics.jsonl.
#pragma once

#include <filesystem>
#include <string>

#include "trireme/observe/metrics.h"

namespace trireme {

/// The page: summary, curves with hover values, samples, resolved configuration. No network, no script from elsewhere;
/// light and dark. Everything that comes from the log is escaped. A log without steps gives a page that says so.
std::string render_report(const RunLog& log);

/// Reads `metrics` and writes `html`, under a temporary name first. Throws IoError; DataError as read_metrics.
void write_report(const std::filesystem::path& metrics, const std::filesystem::path& html);

}  // namespace trireme
