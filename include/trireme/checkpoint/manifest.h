// manifest.json of a checkpoint as a value. docs/checkpoint-format.md describes every field.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/tensor_part.h"
#include "trireme/topology.h"

namespace trireme {

class FileSystem;

/// Bytes that one checksum covers: a reader that needs a part of a slice reads and verifies whole blocks.
inline constexpr int64_t kChecksumBlockBytes = int64_t{1} << 20;
/// The format that this library writes; it reads this one and older ones.
inline constexpr int kManifestVersion = 2;

/// Elements [begin, begin + numel) of the row-major flattening of a tensor's part, as they stand in a shard.
struct SavedSlice {
  int file = 0;  ///< index into Manifest::files
  int64_t begin = 0;
  int64_t numel = 0;
  int64_t offset = 0;               ///< of the first byte in the file
  int64_t bytes = 0;                ///< numel * itemsize
  std::vector<uint64_t> checksums;  ///< XXH3-64 of each block of kChecksumBlockBytes, the last one shorter
  int part = 0;                     ///< index into SavedTensor::parts
};

/// A tensor of the checkpoint, and where its slices are.
struct SavedTensor {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  std::vector<SavedSlice> slices;      ///< by part, then by begin; those of a part have no gap and no overlap
  std::vector<TensorPart> parts = {};  ///< together the tensor, without overlap; empty: one part, all of it
  std::string values = {};             ///< of this tensor, a JSON object; empty: none

  /// The part that `slices[slice]` is of.
  TensorPart part_of(size_t slice) const { return parts.empty() ? TensorPart{shape} : parts[slices[slice].part]; }
};

/// A shard file.
struct SavedFile {
  std::string name;  ///< in the checkpoint's directory
  int64_t bytes = 0;
  int64_t header_bytes = 0;      ///< everything before the data
  uint64_t header_checksum = 0;  ///< XXH3-64 of these bytes
};

/// The contents of manifest.json.
struct Manifest {
  int version = kManifestVersion;
  std::vector<Axis> topology = {{"data", 1}};  ///< of the ranks that saved, the last axis varying fastest
  std::string software = "{}";                 ///< JSON text: versions of trireme, torch, …
  std::string values = "{}";                   ///< JSON text
  std::vector<std::string> rank_values;        ///< JSON text, [world_size()], by rank in `topology`
  std::vector<SavedFile> files;
  std::vector<SavedTensor> tensors;

  int world_size() const { return Topology(topology).size(); }
};

/// The text of manifest.json, its own checksum included.
std::string dump_manifest(const Manifest& manifest);

/// Throws    CheckpointError that opens with `origin`: newer version, wrong checksum, a field that is missing or makes
///           no sense (slices with a gap, an unknown dtype, a file name with a slash).
Manifest parse_manifest(std::string_view text, const std::string& origin);

/// Reads `checkpoint`/manifest.json. Throws as parse_manifest; CheckpointError when there is none.
Manifest read_manifest(const std::filesystem::path& checkpoint);

}  // namespace trireme
