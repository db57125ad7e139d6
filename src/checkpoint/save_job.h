// A save in two halves: what needs the state and its ranks' agreement, and what only needs the bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/shard.h"
#include "trireme/checkpoint/checkpoint.h"

namespace trireme {

struct SaveJob {
  std::string tag;
  int64_t tensor_bytes = 0;  ///< of all ranks
  std::string file_name;     ///< of this rank's shard; empty: it writes none
  std::string header;
  std::vector<SliceBytes> slices;  ///< of the shard, in its order; in the state's memory, until somebody copies them
  SavePlan plan;                   ///< on rank 0 alone
};

/// Agrees on the tag and on who writes what. Collective; touches no file. Throws as save_checkpoint().
SaveJob prepare_save(Group& group, const std::string& tag, const StateTree& state, const SaveOptions& options);

/// Writes the files and lets them appear under their final name. Collective. Throws as save_checkpoint().
SavedCheckpoint write_save(Group& group, const std::filesystem::path& directory, SaveJob job,
                           const SaveOptions& options);

}  // namespace trireme
