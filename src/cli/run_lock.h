// One run at a time writes to a folder.
#pragma once

#include <filesystem>
#include <optional>

#include "cli/launch/rank_process.h"

namespace trireme::cli {

/// Holds the folder of a run: makes it where it is not there, and locks its file `lock` until the object is gone or the
/// process has died, however it did. Where a file system knows no locks, the log says so.
///
/// Throws    ConfigError naming --out: another run holds the folder, it is a file, nothing can be written there.
class RunLock {
 public:
  explicit RunLock(const std::filesystem::path& folder);
  /// The same, but nothing where another run holds the folder.
  static std::optional<RunLock> try_lock(const std::filesystem::path& folder);

 private:
  RunLock() = default;
  /// Whether no other run holds the folder.
  bool lock(const std::filesystem::path& folder);

  Fd file_;
};

/// Whether a RunLock holds `folder`. Writes nothing.
bool is_locked(const std::filesystem::path& folder);

}  // namespace trireme::cli
