// Saving and loading the state of all ranks: one directory per tag, safetensors shards and a manifest, written under a
// temporary name and renamed when complete. docs/checkpoint.md is the manual, docs/checkpoint-format.md the format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/state_tree.h"
#include "trireme/checkpoint/options.h"
#include "trireme/comm/group.h"
#include "trireme/topology.h"

namespace trireme {

class FileSystem;

/// The fate of an existing checkpoint with the tag of a save.
enum class ExistingTag {
  kReplace,  ///< the old checkpoint of this tag stays loadable until the new one is complete
  kRefuse,   ///< CheckpointError
};

/// Whether `directory`/latest names the new checkpoint.
enum class UpdateLatest { kYes, kNo };

/// Options of save_checkpoint().
struct SaveOptions {
  ExistingTag existing = ExistingTag::kReplace;
  UpdateLatest latest = UpdateLatest::kYes;
  TagValidation tags = TagValidation::kWarn;
  /// The axes of the ranks that save, the last one varying fastest; empty: one axis "data". The same on every rank.
  std::vector<Axis> topology = {};
  /// Complete checkpoints that stay in the directory, this one included; the oldest others are removed. 0: all stay.
  int keep_last = 0;
  /// Where the bytes go; nullptr: POSIX files. The same kind on every rank.
  FileSystem* files = nullptr;
};

/// The checkpoint that a save wrote, the same on every rank.
struct SavedCheckpoint {
  std::filesystem::path path;  ///< directory/tag
  int64_t tensor_bytes = 0;    ///< of all ranks
  double seconds = 0;          ///< of the slowest rank, until all was synced; while in_background, of the call
  double blocked_seconds = 0;  ///< how long the caller waited on this rank
  bool in_background = false;  ///< it is not complete yet, and may fail still
};

/// Saves `state` of every rank of `group` as `directory`/`tag` and lets `directory`/latest name it. Collective.
///
/// Every element of a tensor is written once: of ranks that hold the same slice, one writes it (the work is spread
/// evenly). Values of a tensor come from any rank that has them.
///
/// Requires  the slices of all ranks together cover each tensor; two slices are equal or do not overlap; data on the
///           host, or in a store.
/// Ordering  returns on every rank when all files, the directory and `latest` are on disk. Temporaries that a crashed
///           save left are removed first. No reader ever sees a part of a checkpoint under its final name.
/// Cost      writes each byte once, in blocks of 1 MiB straight from the tensors. Extra memory: a block; on rank 0 the
///           manifest, 16 bytes for each slice that a rank holds, and the table of one rank at a time. Rank 0 receives
///           every rank's table, about 100 bytes a slice; the other ranks know their own.
/// Throws    the same error on every rank: CheckpointError (bad tag, other tags on other ranks and kFail, tag exists
///           and kRefuse, slices with a gap or overlap, a tensor with other values on another rank, another run is
///           saving into `directory`), IoError (path and reason: disk full, read-only, directory gone). The previous
///           checkpoint and `latest` are as before, the temporary is removed, `state` is untouched.
SavedCheckpoint save_checkpoint(Group& group, const std::filesystem::path& directory, const std::string& tag,
                                const StateTree& state, const SaveOptions& options = {});

/// The treatment of tensors that only one side of a load has.
enum class Mismatch {
  kRefuse,  ///< CheckpointError that names the tensors
  kIgnore,  ///< leave them as they are
};

/// The contents of a loaded checkpoint beside its tensors.
struct LoadedCheckpoint {
  std::string tag;
  std::string values;                                              ///< JSON text, as saved
  std::vector<std::pair<std::string, std::string>> tensor_values;  ///< JSON text by tensor, of those that have any
  std::vector<Axis> topology;                                      ///< of the ranks that saved
  std::vector<std::string> rank_values;  ///< JSON text of every rank that saved, by rank in `topology`
  std::vector<std::string> missing;      ///< tensors of any rank's destination that the checkpoint does not have
};

/// Options of load_checkpoint().
struct LoadOptions {
  Mismatch missing = Mismatch::kRefuse;  ///< tensors of the destination that the checkpoint does not have
  /// Called with the values before any memory changes; throws to refuse them. Returns which of this rank's tensors
  /// may be missing from this checkpoint. Empty function: none may.
  std::function<std::set<std::string>(const LoadedCheckpoint&)> optional = {};
  Mismatch extra = Mismatch::kRefuse;  ///< tensors of the checkpoint that no rank's destination asks for
  Verify verify = Verify::kWhileReading;
  FileSystem* files = nullptr;  ///< where the bytes come from; nullptr: POSIX files
};

/// Fills `destination` (any slices, at any world size) from the checkpoint `tag` of `directory`. Collective.
///
/// `tag` empty: the one that `directory`/latest names; std::nullopt when `directory` or `latest` does not exist, so
/// that a resumable program can start anew.
///
/// Requires  destination tensors on the host; their data is written in place.
/// Ordering  manifest, names, shapes, dtypes, file sizes and shard headers are checked on all ranks before any rank's
///           memory changes.
/// Cost      each rank reads the blocks (1 MiB) that its slices touch, straight into the tensors.
/// Throws    the same error on every rank: CheckpointError (tag not there: names the complete ones; newer format;
///           missing, extra, mis-shaped tensor or wrong dtype: expected and found; truncated, corrupted or missing
///           shard: file and tensor), IoError. With code kTornLoad the destination is a mixture: load again before use.
std::optional<LoadedCheckpoint> load_checkpoint(Group& group, const std::filesystem::path& directory,
                                                const std::string& tag, StateTree& destination,
                                                const LoadOptions& options = {});

/// The tag that `directory`/latest names; nullopt without such a file. Local. Throws IoError, CheckpointError (not a
/// tag).
std::optional<std::string> latest_tag(const std::filesystem::path& directory);

/// Tags of the complete checkpoints in `directory`, oldest first; empty when there is no such directory. Local.
std::vector<std::string> complete_tags(const std::filesystem::path& directory);

}  // namespace trireme
