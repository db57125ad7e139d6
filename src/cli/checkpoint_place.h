// Which checkpoint a folder means.
#pragma once

#include <filesystem>
#include <string>

namespace trireme::cli {

struct CheckpointPlace {
  std::filesystem::path directory;  ///< that holds the checkpoints
  std::string tag;                  ///< empty: the latest
};

/// `path` may be the folder of a run, the folder of its checkpoints, or one checkpoint.
///
/// Throws    ConfigError: there is no checkpoint.
CheckpointPlace find_checkpoint(const std::filesystem::path& path);

/// For commands that read checkpoints of any layout: the folder of checkpoints when `path` is that of a run, otherwise
/// `path` itself.
///
/// Throws    ConfigError: there is nothing of that name.
std::filesystem::path checkpoints_folder(const std::filesystem::path& path);

}  // namespace trireme::cli
