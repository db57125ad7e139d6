// A checkpoint of any layout written as torch.distributed.checkpoint reads it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "trireme/checkpoint/source.h"

namespace trireme {

class FileSystem;

/// Options of write_torch_distributed().
struct TorchDistributedOptions {
  FileSystem* files = nullptr;                                                 ///< of the output; nullptr: POSIX files
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};  ///< several times per second of work
};

/// The folder that was written.
struct TorchDistributedCheckpoint {
  std::filesystem::path path;
  int64_t tensor_bytes = 0;
};

/// Writes `source` into `folder`, which is made where there is none, so that torch.distributed.checkpoint.load() fills
///
///     {"model": {NAME: weight}, "optim": {"state": {NAME: {STATE: tensor, "step": number}}, "param_groups": […]}}
///
/// at any number of ranks, which is what torch.distributed.checkpoint.state_dict.get_state_dict() gives. Weights are
/// the fp32 masters where there are any; tied parameters stand under each of their names. A further entry, "trireme",
/// keeps the checkpoint's values as JSON text, so that opening the result gives them back.
///
/// Ordering  `.metadata`, which makes the folder a checkpoint, is written last, when all else is on disk; after an
///           error no file has its final name.
/// Cost      reads each tensor once, in blocks of whole rows of about 32 MiB; memory for two of them.
/// Throws    CheckpointError (a checkpoint is there already; no weights; a dtype that torch.save() has no storage for;
///           the source is damaged: file and tensor), IoError.
TorchDistributedCheckpoint write_torch_distributed(const CheckpointSource& source, const std::filesystem::path& folder,
                                                   const TorchDistributedOptions& options = {});

}  // namespace trireme
