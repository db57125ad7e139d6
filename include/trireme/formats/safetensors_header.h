// The header of a safetensors file: written for shards and exports, parsed for reading.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

class FileSystem;

/// A file's data begins at a multiple of this, so that a mapping is aligned for every dtype and vector unit.
inline constexpr int64_t kSafetensorsAlignment = 64;
/// Longest header that readers of the format accept.
inline constexpr int64_t kSafetensorsHeaderLimit = 100'000'000;

/// The name of a dtype as the format defines it: "F32", "BF16", …; manifests have it too.
/// Throws    CheckpointError: a dtype that the format does not have.
std::string safetensors_dtype(at::ScalarType dtype);
/// The inverse; `origin` opens the message of the CheckpointError.
at::ScalarType dtype_from_safetensors(std::string_view name, const std::string& origin);

/// A tensor in the header.
struct SafetensorsEntry {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  int64_t offset = 0;  ///< of the first byte, from the beginning of the data
  int64_t bytes = 0;
};

/// Everything before the data: length, JSON, and the spaces that align the data. Entries stand in the order of their
/// data.
///
/// Throws    CheckpointError that opens with `origin`: a name twice or reserved, a header beyond the format's limit.
std::string dump_safetensors_header(const std::vector<SafetensorsEntry>& entries,
                                    const std::map<std::string, std::string>& metadata, const std::string& origin);

/// A parsed header.
struct SafetensorsHeader {
  int64_t header_bytes = 0;               ///< the length field included
  std::vector<SafetensorsEntry> entries;  ///< ascending by offset
  std::map<std::string, std::string> metadata = {};
};

/// Parses the beginning of a file of `file_bytes` bytes; `file` holds at least the header.
///
/// Throws    CheckpointError that opens with `origin`: truncated, no header, offsets that leave holes, overlap or do
///           not fit.
SafetensorsHeader parse_safetensors_header(std::string_view file, int64_t file_bytes, const std::string& origin);

/// Reads the header of a file and none of its data. Throws as parse_safetensors_header; IoError.
SafetensorsHeader read_safetensors_header(FileSystem& files, const std::filesystem::path& path);

/// Tensor -> name of its file, in the index's folder, of a Hugging Face index (*.safetensors.index.json).
/// Throws    CheckpointError naming the index: not one, or a file in another folder. IoError.
std::map<std::string, std::string> read_safetensors_index(const std::filesystem::path& path);

}  // namespace trireme
