// The `.metadata` of torch.distributed.checkpoint as plain values.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace trireme::dcp {

inline constexpr char kMetadataName[] = ".metadata";
/// Entries that write_torch_distributed() adds, as JSON text: the values, and the dtypes of weights whose masters stand
/// there.
inline constexpr char kValuesName[] = "trireme";
inline constexpr char kRoundedName[] = "trireme_rounded";

/// One archive of torch.save(), somewhere in a file: a block of a tensor, or any other object.
struct StoredItem {
  std::vector<int64_t> offsets;  ///< of the block within the tensor, by dim
  std::vector<int64_t> sizes;
  std::string file;
  int64_t begin = 0;  ///< bytes in the file
  int64_t bytes = 0;
};

/// An entry of the state dictionary.
struct StoredEntry {
  std::string key;
  std::vector<std::string> path;  ///< keys of the nested dictionaries that `key` joins with dots
  bool is_tensor = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  std::vector<StoredItem> items;  ///< of a tensor its blocks, otherwise one
};

/// Throws    CheckpointError naming `file` and entry: as pickle::parse, or not what torch.distributed.checkpoint
///           writes; IoError.
std::vector<StoredEntry> read_metadata(const std::filesystem::path& file);

/// Calls take(first element in the tensor, first element in the block, number of elements) for each range of a block
/// that is consecutive in the tensor's row-major order, ascending. Pure.
void for_each_run(const std::vector<int64_t>& shape, const StoredItem& block,
                  const std::function<void(int64_t, int64_t, int64_t)>& take);

}  // namespace trireme::dcp
