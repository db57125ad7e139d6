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

SliceBytes::SliceBytes(const TensorSlice& slice) : store(slice.store) {
  if (store != nullptr) {
    size = store->numel() * c10::elementSize(store->dtype());
  } else {
    size = slice.data.nbytes();
    memory = {static_cast<const std::byte*>(slice.data.const_data_ptr()), size};
  }
}

std::vector<std::vector<uint64_t>> write_shard(FileSystem& files, const std::filesystem::path& path,
                                               const std::string& header, const std::vector<SliceBytes>& slices) {
  const auto file = files.create(path);
  GatheringWriter writer(*file);
  writer.write(header.data(), header.size());
  std::vector<std::vector<uint64_t>> checksums;
  std::vector<std::byte> scratch;
  for (const SliceBytes& slice : slices) {
    auto& blocks = checksums.emplace_back();
    for (size_t begin = 0; begin < slice.size; begin += kChecksumBlockBytes) {
      const size_t bytes = std::min<size_t>(kChecksumBlockBytes, slice.size - begin);
      if (slice.store != nullptr) {
        scratch.resize(kChecksumBlockBytes);
        slice.store->read({static_cast<int64_t>(begin)}, {scratch.data(), bytes});
      }
      const std::byte* block = slice.store ? scratch.data() : &slice.memory[begin];
      blocks.push_back(checksum_of(block, bytes));
      writer.write(block, bytes);
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
  return str((checkpoint_ / manifest_.files[slice_of(read).file].name).string(), ": tensor \"",
             label_of(tensor_of(read), read.slice), "\"");
}

ReadableFile& ShardReader::open(const SliceRead& read) {
  const int index = slice_of(read).file;
  auto& file = open_[index];
  if (!file) file = files_.open(checkpoint_ / manifest_.files[index].name);
  return *file;
}

void ShardReader::check_file(const SliceRead& read) {
  const int index = slice_of(read).file;
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
  const SavedSlice& slice = slice_of(read);
  const uint64_t found = checksum_of(data.data(), data.size());
  if (found == slice.checksums[block]) return;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor_of(read).dtype));
  const int64_t first = slice.begin + block * kChecksumBlockBytes / itemsize;
  throw CheckpointError(str(describe(read), ", elements [", first, ", ",
                            first + static_cast<int64_t>(data.size()) / itemsize, ") are damaged: checksum ",
                            checksum_text(found), ", expected ", checksum_text(slice.checksums[block]),
                            "; load another checkpoint"));
}

void ShardReader::read(const SliceRead& read, std::byte* destination) {
  read_blocks(read, destination, [&](int64_t begin, std::span<const std::byte> bytes) {
    std::memcpy(destination + begin, bytes.data(), bytes.size());
  });
}

void ShardReader::read(const SliceRead& read, const Take& take) { read_blocks(read, nullptr, take); }

// A block that one range of the destination needs whole is read in place.
void ShardReader::read_blocks(const SliceRead& read, std::byte* destination, const Take& take) {
  const SavedSlice& slice = slice_of(read);
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor_of(read).dtype));
  const int64_t block_numel = kChecksumBlockBytes / itemsize;
  ReadableFile& file = open(read);
  int64_t first = slice.numel, last = 0;
  for (const PartRun& run : read.runs) {
    first = std::min(first, run.a);
    last = std::max(last, run.a_end());
  }
  for (int64_t block = first / block_numel; block * block_numel < last; ++block) {
    const Interval elements{block * block_numel, std::min((block + 1) * block_numel, slice.numel)};
    std::vector<PartRun> pieces;
    for (const PartRun& run : read.runs)
      for (const PartRun& piece : clip(run, elements, {0, INT64_MAX})) pieces.push_back(piece);
    if (pieces.empty()) continue;
    const int64_t bytes = elements.size() * itemsize;
    const bool in_place = destination && pieces[0].length == elements.size();
    if (!in_place) scratch_.resize(kChecksumBlockBytes);
    std::byte* data = in_place ? destination + pieces[0].b * itemsize : scratch_.data();
    file.read(slice.offset + elements.begin * itemsize, data, bytes);
    verify(read, block, {data, static_cast<size_t>(bytes)});
    if (in_place || !take) continue;
    for (const PartRun& piece : pieces)
      for (int64_t row = 0; row < piece.count; ++row)
        take((piece.b + row * piece.b_stride) * itemsize,
             {data + (piece.a + row * piece.a_stride - elements.begin) * itemsize,
              static_cast<size_t>(piece.length * itemsize)});
  }
}

}  // namespace trireme
