#include <algorithm>
#include <cstring>

#include "checkpoint/checksum.h"
#include "checkpoint/shard.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

/// Parts below this are gathered into larger writes: a model has hundreds of biases and norms of a few KiB.
constexpr size_t kDirectWriteBytes = 64 << 10;

/// Appends to a file; small pieces wait in a buffer.
class GatheringWriter {
 public:
  explicit GatheringWriter(WritableFile& file) : file_(file) { buffer_.reserve(kChecksumBlockBytes); }

  void write(const void* data, size_t bytes) {
    if (bytes >= kDirectWriteBytes || buffer_.size() + bytes > buffer_.capacity()) flush();
    if (bytes >= kDirectWriteBytes) {
      file_.write(data, bytes);
    } else {
      buffer_.append(static_cast<const char*>(data), bytes);
    }
  }

  void flush() {
    if (!buffer_.empty()) file_.write(buffer_.data(), buffer_.size());
    buffer_.clear();
  }

 private:
  WritableFile& file_;
  std::string buffer_;
};

}  // namespace

std::vector<std::vector<uint64_t>> write_shard(FileSystem& files, const std::filesystem::path& path,
                                               const std::string& header,
                                               const std::vector<std::span<const std::byte>>& parts) {
  const auto file = files.create(path);
  GatheringWriter writer(*file);
  writer.write(header.data(), header.size());
  std::vector<std::vector<uint64_t>> checksums;
  for (const auto& part : parts) {
    auto& blocks = checksums.emplace_back();
    for (size_t begin = 0; begin < part.size(); begin += kChecksumBlockBytes) {
      const auto block = part.subspan(begin, std::min<size_t>(kChecksumBlockBytes, part.size() - begin));
      blocks.push_back(checksum_of(block.data(), block.size()));
      writer.write(block.data(), block.size());
    }
  }
  writer.flush();
  file->sync();
  file->close();
  return checksums;
}

ShardReader::ShardReader(FileSystem& files, const std::filesystem::path& checkpoint, const Manifest& manifest)
    : files_(files), checkpoint_(checkpoint), manifest_(manifest), open_(manifest.files.size()) {}

std::string ShardReader::describe(const SliceRead& read) const {
  const SavedTensor& tensor = manifest_.tensors[read.tensor];
  const SavedFile& file = manifest_.files[tensor.slices[read.slice].file];
  return str((checkpoint_ / file.name).string(), ": tensor \"", tensor.name, "\"");
}

ReadableFile& ShardReader::open(const SliceRead& read) {
  const int index = manifest_.tensors[read.tensor].slices[read.slice].file;
  auto& file = open_[index];
  if (!file) file = files_.open(checkpoint_ / manifest_.files[index].name);
  return *file;
}

void ShardReader::check_file(const SliceRead& read) {
  const int index = manifest_.tensors[read.tensor].slices[read.slice].file;
  if (open_[index]) return;  // checked before
  const SavedFile& expected = manifest_.files[index];
  if (!files_.exists(checkpoint_ / expected.name))
    throw CheckpointError(describe(read) + ": the shard is missing; load another checkpoint");
  ReadableFile& file = open(read);
  if (static_cast<int64_t>(file.bytes()) != expected.bytes) {
    throw CheckpointError(str(describe(read), ": the shard has ", file.bytes(), " bytes, expected ", expected.bytes,
                              ": it is truncated or was changed; load another checkpoint"));
  }
  std::string header(expected.header_bytes, '\0');
  file.read(0, header.data(), header.size());
  if (checksum_of(header) != expected.header_checksum)
    throw CheckpointError(describe(read) + ": the shard's header is damaged: wrong checksum; load another checkpoint");
}

void ShardReader::verify(const SliceRead& read, int64_t block, std::span<const std::byte> data) const {
  const SavedTensor& tensor = manifest_.tensors[read.tensor];
  const SavedSlice& slice = tensor.slices[read.slice];
  const uint64_t found = checksum_of(data.data(), data.size());
  if (found == slice.checksums[block]) return;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t first = slice.begin + block * kChecksumBlockBytes / itemsize;
  throw CheckpointError(str(describe(read), ", elements [", first, ", ",
                            first + static_cast<int64_t>(data.size()) / itemsize, ") are damaged: checksum ",
                            checksum_text(found), ", expected ", checksum_text(slice.checksums[block]),
                            "; load another checkpoint"));
}

void ShardReader::read(const SliceRead& read, std::byte* destination) {
  const SavedTensor& tensor = manifest_.tensors[read.tensor];
  const SavedSlice& slice = tensor.slices[read.slice];
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t wanted_begin = read.begin * itemsize;
  const int64_t wanted_end = wanted_begin + read.numel * itemsize;
  ReadableFile& file = open(read);
  for (int64_t block = wanted_begin / kChecksumBlockBytes; block * kChecksumBlockBytes < wanted_end; ++block) {
    const int64_t begin = block * kChecksumBlockBytes;
    const int64_t end = std::min(begin + kChecksumBlockBytes, slice.bytes);
    const bool direct = destination && begin >= wanted_begin && end <= wanted_end;
    if (!direct) scratch_.resize(kChecksumBlockBytes);
    std::byte* data = direct ? destination + (begin - wanted_begin) : scratch_.data();
    file.read(slice.offset + begin, data, end - begin);
    verify(read, block, {data, static_cast<size_t>(end - begin)});
    if (direct || !destination) continue;
    const int64_t copy_begin = std::max(begin, wanted_begin);
    const int64_t copy_end = std::min(end, wanted_end);
    std::memcpy(destination + (copy_begin - wanted_begin), data + (copy_begin - begin), copy_end - copy_begin);
  }
}

}  // namespace trireme
