#include "cli/checkpoint_place.h"

#include "trireme/base/error.h"
#include "trireme/checkpoint/checkpoint.h"

namespace trireme::cli {

CheckpointPlace find_checkpoint(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto absolute = std::filesystem::weakly_canonical(path, ignored);
  if (std::filesystem::is_regular_file(absolute, ignored)) {
    throw ConfigError(str("--checkpoint ", path.string(),
                          ": this is a file; give the folder of a run, of its checkpoints, or of one checkpoint"));
  }
  if (!std::filesystem::is_directory(absolute, ignored)) {
    throw ConfigError(str("--checkpoint ", path.string(), ": there is no such folder"));
  }
  for (const auto& directory : {absolute / "checkpoints", absolute}) {
    if (latest_tag(directory)) return {directory, ""};
  }
  for (const auto& tag : complete_tags(absolute.parent_path())) {
    if (tag == absolute.filename()) return {absolute.parent_path(), tag};
  }
  for (const auto& directory : {absolute / "checkpoints", absolute})
    if (const auto tags = complete_tags(directory); !tags.empty())
      throw ConfigError(
          str("--checkpoint ", path.string(),
              ": no file `latest` says which checkpoint is meant; give one: ", (directory / tags.back()).string()));
  throw ConfigError(
      str("--checkpoint ", path.string(), ": no checkpoint in this folder; give that of a run of `trireme train`"));
}

std::filesystem::path checkpoints_folder(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored))
    throw ConfigError(str(path.string(), ": there is no such file or folder"));
  return std::filesystem::is_directory(path / "checkpoints", ignored) ? path / "checkpoints" : path;
}

}  // namespace trireme::cli
