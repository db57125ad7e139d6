// One file of whole tensors, written by rank 0 from tensors that no rank needs to hold all at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

class FileSystem;

/// One tensor to write, and how to get its data.
struct ExportedTensor {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  /// Called once, on every rank, in the same order; may be collective. Rank 0 reads the result before the next call.
  std::function<at::Tensor()> fetch;
};

/// Options of export_tensors().
struct ExportOptions {
  /// Other name -> name of the tensor that it is tied to. Its bytes are written once.
  std::map<std::string, std::string> aliases = {};
  FileSystem* files = nullptr;  ///< where the bytes go; nullptr: POSIX files
};

/// Throws ConfigError: the extension of `file` names none of the formats that export_tensors() writes.
void check_export_format(const std::filesystem::path& file);

/// Writes `tensors` into `file`, in a folder that is made where there is none. Collective.
///
/// By its extension: .safetensors (an alias stands in the metadata, as Python's `safetensors` writes it), or .bin, .pt,
/// .pth: a dictionary that Python's torch.load(weights_only=True) reads, where an alias shares the storage.
///
/// Ordering  returns on every rank when the file is on disk. It appears complete or not at all.
/// Cost      memory for one tensor on rank 0, beyond what fetch() holds.
/// Throws    on every rank alike, after the last fetch(): ConfigError (another extension), CheckpointError (a name
///           twice, a dtype that the format does not have, a fetched tensor of another shape), IoError (disk full, read
///           only); a former file of that name is as before. What fetch() throws, at once.
void export_tensors(Group& group, const std::filesystem::path& file, const std::vector<ExportedTensor>& tensors,
                    const ExportOptions& options = {});

}  // namespace trireme
