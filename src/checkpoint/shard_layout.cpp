#include <algorithm>

#include "checkpoint/checksum.h"
#include "checkpoint/shard.h"
#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

std::string file_name(int rank, int world_size) {
  return formatted("shard-{:05}-of-{:05}.safetensors", rank, world_size);
}

/// A whole tensor stands under its own name and shape, so that a checkpoint of one rank is a plain safetensors file; a
/// whole part has the shape of a rank's tensor.
SafetensorsEntry entry_of(const SavedTensor& tensor, size_t index, int64_t offset) {
  const SavedSlice& slice = tensor.slices[index];
  const TensorPart part = tensor.part_of(index);
  SafetensorsEntry entry{.name = label_of(tensor, index),
                         .shape = local_shape(part),
                         .dtype = tensor.dtype,
                         .offset = offset,
                         .bytes = slice.bytes};
  if (slice.numel < local_numel(part)) {
    entry.name += str("[", slice.begin, ":", slice.begin + slice.numel, "]");
    entry.shape = {slice.numel};
  }
  return entry;
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
    entries.push_back(entry_of(tensors[tensor], index, data_bytes));
    data_bytes += entries.back().bytes;
  }
  shard.header = dump_safetensors_header(entries, {{"format", "pt"}, {"written_by", "trireme"}}, file.name);
  file.header_bytes = static_cast<int64_t>(shard.header.size());
  file.header_checksum = checksum_of(shard.header);
  file.bytes = file.header_bytes + data_bytes;
  for (size_t i = 0; i < entries.size(); ++i)
    tensors[shard.slices[i].tensor].slices[shard.slices[i].slice].offset = file.header_bytes + entries[i].offset;
}

}  // namespace

std::string label_of(const SavedTensor& tensor, size_t slice) {
  const std::string cut = part_text(tensor.part_of(slice));
  return cut.empty() ? tensor.name : str(tensor.name, " (", cut, ")");
}

SavePlan plan_shards(std::vector<TensorWrites> writes, int world_size) {
  std::vector<ShardPlan> shard_of_rank(world_size);
  SavePlan plan;
  for (TensorWrites& tensor : writes) {
    SavedTensor saved{.name = std::move(tensor.name),
                      .shape = tensor.shape(),
                      .dtype = tensor.dtype,
                      .slices = {},
                      .parts = {},
                      .values = std::move(tensor.values)};
    if (tensor.parts.front().dim >= 0) saved.parts = std::move(tensor.parts);
    for (const SliceWrite& write : tensor.slices) {
      shard_of_rank[write.rank].slices.push_back({write.index, plan.manifest.tensors.size(), saved.slices.size()});
      saved.slices.push_back({.file = write.rank,
                              .begin = write.begin,
                              .numel = write.numel,
                              .offset = 0,
                              .bytes = write.numel * static_cast<int64_t>(c10::elementSize(tensor.dtype)),
                              .checksums = {},
                              .part = write.part});
    }
    plan.manifest.tensors.push_back(std::move(saved));
  }

  for (int rank = 0; rank < world_size; ++rank) {
    ShardPlan& shard = shard_of_rank[rank];
    if (shard.slices.empty()) continue;
    shard.rank = rank;
    SavedFile file{.name = file_name(shard.rank, world_size)};
    lay_out(shard, file, plan.manifest.tensors);
    for (const auto& [source, tensor, slice] : shard.slices)
      plan.manifest.tensors[tensor].slices[slice].file = static_cast<int>(plan.shards.size());
    plan.manifest.files.push_back(std::move(file));
    plan.shards.push_back(std::move(shard));
  }
  return plan;
}

}  // namespace trireme
