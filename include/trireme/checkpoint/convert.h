// A checkpoint of any layout written in another one, a few MiB at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/source.h"

namespace trireme {

/// Options of the functions below.
struct ConvertOptions {
  std::string tag = {};  ///< empty: the source's, or "converted" where it has none
  /// Called now and then, and at the end, with bytes of tensors read so far and in all.
  std::function<void(int64_t done, int64_t total)> progress = {};
  FileSystem* files = nullptr;  ///< where the bytes go; nullptr: POSIX files
};

/// Writes `source` as `directory`/TAG in this library's layout, and lets `directory`/latest name it. Local.
///
/// Engines of any world size and ZeRO stage load it. What the source does not have, such as the state of random number
/// generators, stays as the engine has it.
///
/// Ordering  complete and on disk, or not there.
/// Cost      memory for blocks of 4 MiB and the manifest, whatever the tensors' sizes.
/// Throws    CheckpointError (the tag exists; the source is damaged: file and tensor), IoError.
SavedCheckpoint write_trireme_checkpoint(const CheckpointSource& source, const std::filesystem::path& directory,
                                         const ConvertOptions& options = {});

/// The run of DeepSpeed that the written checkpoint is for.
struct DeepSpeedLayout {
  int stage = 3;  ///< ZeRO stage, 1 to 3
  int ranks = 1;  ///< data-parallel ranks that will load it: DeepSpeed loads at no other number
};

/// Writes `source` as `directory`/TAG in the layout that DeepSpeed's load_checkpoint() and zero_to_fp32.py read.
///
/// Weights, masters, optimizer states, step counts, loss scale, counters, the position of the schedule and the client
/// state come along. DeepSpeed wants parameters in the order and the groups of the program that loads them: those of
/// TrainingValues::groups.
///
/// Ordering  complete and on disk, or not there; `latest` last.
/// Cost      memory for 32 MiB; what a rank keeps of a larger flat tensor goes through a temporary file beside it.
/// Throws    ConfigError (stage or ranks); CheckpointError (the tag exists; no optimizer states, unknown groups, a
///           client state with a key of DeepSpeed's; the source is damaged), IoError.
SavedCheckpoint write_deepspeed_checkpoint(const CheckpointSource& source, const std::filesystem::path& directory,
                                           const DeepSpeedLayout& layout, const ConvertOptions& options = {});

}  // namespace trireme
