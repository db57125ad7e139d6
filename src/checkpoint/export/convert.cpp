// The writer of this library's own layout, from any source.
#include "checkpoint/export/convert.h"

#include <torch/version.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/checksum.h"
#include "checkpoint/directory.h"
#include "checkpoint/shard.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/version.h"

namespace trireme {
namespace {

/// One shard is filled before the next begins, so that ranks and verification can read several at once.
constexpr int64_t kShardBytes = int64_t{4} << 30;

/// The copy's shards: whole tensors, with what the source knows of each. `index` of a write is the source's tensor.
SavePlan plan_copy(const Manifest& manifest) {
  std::vector<TensorWrites> writes;
  int shard = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    const SavedTensor& tensor = manifest.tensors[i];
    const int64_t numel = checked_numel(tensor.shape, tensor.name);
    const int64_t tensor_bytes = numel * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    if (bytes > 0 && bytes + tensor_bytes > kShardBytes) {
      ++shard;
      bytes = 0;
    }
    bytes += tensor_bytes;
    writes.push_back({.name = tensor.name,
                      .dtype = tensor.dtype,
                      .parts = {{tensor.shape}},
                      .slices = {{.numel = numel, .rank = shard, .index = i}},
                      .values = tensor.values});
  }
  return plan_shards(std::move(writes), shard + 1);
}

void write_copied_shard(FileSystem& files, const std::filesystem::path& path, SavePlan& plan, size_t shard,
                        BlockReader& reader) {
  const auto file = files.create(path);
  const std::string& header = plan.shards[shard].header;
  file->write(header.data(), header.size());
  for (const ShardSlice& place : plan.shards[shard].slices) {
    SavedSlice& slice = plan.manifest.tensors[place.tensor].slices[place.slice];
    reader.read(place.source, slice.begin, slice.numel, [&](std::span<const std::byte> block) {
      for (size_t begin = 0; begin < block.size(); begin += kChecksumBlockBytes)
        slice.checksums.push_back(
            checksum_of(&block[begin], std::min<size_t>(kChecksumBlockBytes, block.size() - begin)));
      file->write(block.data(), block.size());
    });
  }
  file->sync();
  file->close();
}

}  // namespace

BlockReader::BlockReader(const CheckpointSource& source, const ConvertOptions& options, int64_t total_bytes)
    : source_(source), options_(options), total_(total_bytes), reader_(source), block_(kConvertBlockBytes) {}

void BlockReader::read(size_t tensor, int64_t begin, int64_t numel,
                       const std::function<void(std::span<const std::byte>)>& take) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(source_.manifest.tensors[tensor].dtype));
  const int64_t block_numel = kConvertBlockBytes / itemsize;
  for (int64_t next = 0; next < numel; next += block_numel) {
    const int64_t count = std::min(block_numel, numel - next);
    reader_.read(tensor, begin + next, count, block_.data());
    take({block_.data(), static_cast<size_t>(count * itemsize)});
    done_ += count * itemsize;
    if (options_.progress) options_.progress(done_, total_);
  }
}

void BlockReader::finish() {
  if (options_.progress) options_.progress(total_, total_);
}

std::string tag_of_copy(const CheckpointSource& source, const ConvertOptions& options) {
  const std::string tag = !options.tag.empty() ? options.tag : source.tag.empty() ? "converted" : source.tag;
  check_tag(tag);
  return tag;
}

SavedCheckpoint write_trireme_checkpoint(const CheckpointSource& source, const std::filesystem::path& directory,
                                         const ConvertOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  FileSystem& files = options.files ? *options.files : posix_file_system();
  const std::string tag = tag_of_copy(source, options);
  SavePlan plan = plan_copy(source.manifest);
  SavedCheckpoint saved{.path = directory / tag};
  for (const SavedFile& file : plan.manifest.files) saved.tensor_bytes += file.bytes - file.header_bytes;

  SaveTransaction transaction(files, directory, tag, {.existing = ExistingTag::kRefuse});
  BlockReader reader(source, options, saved.tensor_bytes);
  for (size_t shard = 0; shard < plan.shards.size(); ++shard)
    write_copied_shard(files, transaction.temporary() / plan.manifest.files[shard].name, plan, shard, reader);
  plan.manifest.software = Json{{"trireme", kVersion},
                                {"torch", TORCH_VERSION},
                                {"converted_from", layout_name(source.layout)},
                                {"by", Json::parse(source.manifest.software)}}
                               .dump();
  plan.manifest.values = source.manifest.values;
  plan.manifest.rank_values = source.manifest.rank_values;
  plan.manifest.topology = source.manifest.topology;
  transaction.commit(dump_manifest(plan.manifest));
  reader.finish();
  saved.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return saved;
}

}  // namespace trireme
