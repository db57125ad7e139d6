// The safetensors file format: named tensors behind a JSON header. Readable and written by Python's `safetensors`.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

class FileSystem;

using NamedTensors = std::map<std::string, at::Tensor>;

/// Maps a file's tensors into memory. `path` is a .safetensors file, a Hugging Face index (*.safetensors.index.json),
/// or a folder with model.safetensors.index.json or model.safetensors.
///
/// The tensors alias a private mapping of the file: nothing is read before it is touched, writes do not reach the file.
/// A tensor that is not aligned to its element size is copied.
///
/// Throws    IoError (not there, not readable); CheckpointError naming file and tensor: truncated, no valid header,
///           offsets that overlap, leave holes or do not fit shape and dtype, a dtype that torch does not have; a
///           tensor of the index that its shard does not hold.
NamedTensors read_safetensors(const std::filesystem::path& path);

/// Writes a file with the given tensors (contiguous or not, on the host), synced, under a temporary name, then renamed.
/// `metadata` becomes "__metadata__"; "format": "pt" is added, because Hugging Face's reader insists on it.
///
/// Throws    CheckpointError: a name twice, "__metadata__" as a name, a dtype that the format does not have. IoError.
void write_safetensors(const std::filesystem::path& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace trireme
