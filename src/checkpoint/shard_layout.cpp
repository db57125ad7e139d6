#include <algorithm>
#include <cstdio>

#include "checkpoint/checksum.h"
#include "checkpoint/safetensors_format.h"
#include "checkpoint/shard.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

std::string file_name(int rank, size_t world_size) {
  char name[64];
  std::snprintf(name, sizeof name, "shard-%05d-of-%05d.safetensors", rank, static_cast<int>(world_size));
  return name;
}

/// A whole tensor stands under its own name and shape, so that a checkpoint of one rank is a plain safetensors file.
SafetensorsEntry entry_of(const SavedTensor& tensor, const SavedSlice& slice, int64_t offset) {
  const bool whole = tensor.slices.size() == 1;
  return {.name = whole ? tensor.name : str(tensor.name, "[", slice.begin, ":", slice.begin + slice.numel, "]"),
          .shape = whole ? tensor.shape : std::vector<int64_t>{slice.numel},
          .dtype = tensor.dtype,
          .offset = offset,
          .bytes = slice.bytes};
}

/// Gives the shard's slices their places and builds its header.
void lay_out(ShardPlan& shard, SavedFile& file, std::vector<SavedTensor>& tensors) {
  // Wide dtypes first: each slice is aligned for its dtype without holes, which the format forbids.
  std::stable_sort(shard.slices.begin(), shard.slices.end(), [&](const ShardSlice& a, const ShardSlice& b) {
    return c10::elementSize(tensors[a.tensor].dtype) > c10::elementSize(tensors[b.tensor].dtype);
  });
  std::vector<SafetensorsEntry> entries;
  int64_t data_bytes = 0;
  for (const auto& [source, tensor, index] : shard.slices) {
    const SavedSlice& slice = tensors[tensor].slices[index];
    entries.push_back(entry_of(tensors[tensor], slice, data_bytes));
    data_bytes += slice.bytes;
  }
  shard.header = dump_safetensors_header(entries, {{"format", "pt"}, {"written_by", "trireme"}}, file.name);
  file.header_bytes = static_cast<int64_t>(shard.header.size());
  file.header_checksum = checksum_of(shard.header);
  file.bytes = file.header_bytes + data_bytes;
  for (size_t i = 0; i < entries.size(); ++i)
    tensors[shard.slices[i].tensor].slices[shard.slices[i].slice].offset = file.header_bytes + entries[i].offset;
}

}  // namespace

SavePlan plan_shards(const std::vector<std::vector<SliceSpec>>& table_of_rank) {
  const size_t world_size = table_of_rank.size();
  std::vector<ShardPlan> shard_of_rank(world_size);
  SavePlan plan;
  for (const TensorWrites& tensor : plan_writes(table_of_rank)) {
    SavedTensor saved{tensor.name, tensor.shape, tensor.dtype, {}};
    for (const SliceWrite& write : tensor.slices) {
      const SliceSpec& source = table_of_rank[write.rank][write.index];
      const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
      shard_of_rank[write.rank].slices.push_back({write.index, plan.manifest.tensors.size(), saved.slices.size()});
      saved.slices.push_back({.file = write.rank,
                              .begin = source.begin,
                              .numel = source.numel,
                              .offset = 0,
                              .bytes = source.numel * itemsize,
                              .checksums = {}});
    }
    plan.manifest.tensors.push_back(std::move(saved));
  }

  for (size_t rank = 0; rank < world_size; ++rank) {
    ShardPlan& shard = shard_of_rank[rank];
    if (shard.slices.empty()) continue;
    shard.rank = static_cast<int>(rank);
    SavedFile file{.name = file_name(shard.rank, world_size)};
    lay_out(shard, file, plan.manifest.tensors);
    for (const auto& [source, tensor, slice] : shard.slices)
      plan.manifest.tensors[tensor].slices[slice].file = static_cast<int>(plan.shards.size());
    plan.manifest.files.push_back(std::move(file));
    plan.shards.push_back(std::move(shard));
  }
  plan.manifest.world_size = static_cast<int>(world_size);
  return plan;
}

}  // namespace trireme
