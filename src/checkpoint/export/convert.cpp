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
                        PieceReader& reader) {
  const auto file = files.create(path);
  const std::string& header = plan.shards[shard].header;
  file->write(header.data(), header.size());
  for (const ShardSlice& place : plan.shards[shard].slices) {
    SavedSlice& slice = plan.manifest.tensors[place.tensor].slices[place.slice];
    reader.read(place.source, slice.begin, slice.numel, [&](const PieceReader::Piece& piece) {
      for (size_t begin = 0; begin < piece.bytes.size(); begin += kChecksumBlockBytes)
        slice.checksums.push_back(
            checksum_of(&piece.bytes[begin], std::min<size_t>(kChecksumBlockBytes, piece.bytes.size() - begin)));
      file->write(piece.bytes.data(), piece.bytes.size());
    });
  }
  file->sync();
  file->close();
}

}  // namespace

void ByteProgress::add(int64_t bytes) {
  done_ += bytes;
  const Clock::time_point now = Clock::now();
  if (!tell_ || (done_ < total_ && now - last_ < std::chrono::milliseconds(100))) return;
  last_ = now;
  tell_(told_ = done_, total_);
}

void ByteProgress::finish() {
  if (tell_ && told_ != total_) tell_(told_ = total_, total_);
}

void PieceReader::read(size_t tensor, int64_t begin, int64_t numel, const std::function<void(const Piece&)>& take) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(source_.manifest.tensors[tensor].dtype));
  for (const int64_t end = begin + numel; begin < end; begin += kPieceBytes / itemsize) {
    const int64_t count = std::min(kPieceBytes / itemsize, end - begin);
    reader_.read(tensor, begin, count, bytes_.data());
    take({begin, count, {bytes_.data(), static_cast<size_t>(count * itemsize)}});
    if (progress_) progress_->add(count * itemsize);
  }
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
  ByteProgress progress(options.progress, saved.tensor_bytes);
  PieceReader reader(source, &progress);
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
  progress.finish();
  saved.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return saved;
}

}  // namespace trireme
