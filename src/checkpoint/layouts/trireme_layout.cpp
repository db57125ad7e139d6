// This library's own layout: the manifest is there already.
#include "checkpoint/layouts/layout.h"

namespace trireme {

bool is_trireme_checkpoint(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path / "manifest.json", ignored);
}

CheckpointSource open_trireme_checkpoint(const std::filesystem::path& path) {
  constexpr std::string_view kOldPrefix = ".old-";
  std::string tag = path.filename().string();
  if (tag.starts_with(kOldPrefix)) tag = tag.substr(kOldPrefix.size());
  return {.layout = CheckpointLayout::kTrireme, .folder = path, .tag = std::move(tag), .manifest = read_manifest(path)};
}

}  // namespace trireme
