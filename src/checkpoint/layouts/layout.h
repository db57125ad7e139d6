// The layouts that open_checkpoint() knows. A new one is its two functions and one line in the table of layout.cpp.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "trireme/checkpoint/source.h"

namespace trireme {

struct LayoutEntry {
  CheckpointLayout layout;
  const char* sign;  ///< what recognises() looks for, as a message says it
  /// Whether `path` is one checkpoint of this layout: looks at names and reads nothing. Never throws.
  bool (*recognises)(const std::filesystem::path& path);
  /// Opens what was recognised. Throws as open_checkpoint.
  CheckpointSource (*open)(const std::filesystem::path& path);
};

/// In the order in which they are tried.
std::span<const LayoutEntry> known_layouts();

/// The layout of the one checkpoint `path`; nullptr: none that is known.
const LayoutEntry* layout_of(const std::filesystem::path& path);

/// The checkpoint that open_checkpoint(path, tag) opens. Throws as that, where there is none.
std::filesystem::path resolve_checkpoint(const std::filesystem::path& path, const std::string& tag);

/// Names of the checkpoints in `folder`, of any layout that has a folder per checkpoint, oldest first.
std::vector<std::string> tags_in(const std::filesystem::path& folder);

bool is_trireme_checkpoint(const std::filesystem::path& path);
CheckpointSource open_trireme_checkpoint(const std::filesystem::path& path);

bool is_deepspeed_checkpoint(const std::filesystem::path& path);
CheckpointSource open_deepspeed_checkpoint(const std::filesystem::path& path);

bool is_torch_distributed_checkpoint(const std::filesystem::path& path);
CheckpointSource open_torch_distributed_checkpoint(const std::filesystem::path& path);

bool is_safetensors_checkpoint(const std::filesystem::path& path);
CheckpointSource open_safetensors_checkpoint(const std::filesystem::path& path);
/// The file or index that `path` stands for; empty: none.
std::filesystem::path safetensors_weights(const std::filesystem::path& path);

}  // namespace trireme
