// A save in two halves: what needs the state and its ranks' agreement, and what only needs the bytes.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/shard.h"
#include "trireme/checkpoint/checkpoint.h"

namespace trireme {

struct SaveJob {
  std::string tag;
  SavePlan plan;
  std::string values;
  std::vector<std::string> values_of_rank;
  /// What this rank writes, in the order of its shard. Of the state's tensors, until somebody copies them.
  std::vector<std::span<const std::byte>> parts;
};

/// Agrees on the tag and on who writes what. Collective; touches no file. Throws as save_checkpoint().
SaveJob prepare_save(Group& group, const std::string& tag, const StateTree& state, const SaveOptions& options);

/// Writes the files and lets them appear under their final name. Collective. Throws as save_checkpoint().
SavedCheckpoint write_save(Group& group, const std::filesystem::path& directory, SaveJob job,
                           const SaveOptions& options);

}  // namespace trireme
