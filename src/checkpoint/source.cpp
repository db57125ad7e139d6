#include "trireme/checkpoint/source.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <vector>

#include "checkpoint/shard.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/reshard.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

/// Reads from files whose bytes nothing vouches for. Their tensors have no parts, so a run is one range.
class PlainReader {
 public:
  explicit PlainReader(const CheckpointSource& source) : source_(source), open_(source.manifest.files.size()) {}

  void read(const SliceRead& read, std::byte* destination) {
    const SavedTensor& tensor = source_.manifest.tensors[read.tensor];
    const SavedSlice& slice = tensor.slices[read.slice];
    const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    const Path path = source_.folder / source_.manifest.files[slice.file].name;
    const std::string where = str(path.string(), ": tensor \"", tensor.name, "\"");
    ReadableFile& file = open(slice.file, path, where);
    for (const PartRun& run : read.runs) {
      const int64_t begin = slice.offset + run.a * itemsize;
      const int64_t bytes = run.length * itemsize;
      if (begin + bytes > static_cast<int64_t>(file.bytes())) {
        throw CheckpointError(str(where, ": elements [", slice.begin + run.a, ", ", slice.begin + run.a_end(),
                                  ") need the file's bytes up to ", begin + bytes, ", it has ", file.bytes(),
                                  ": it is truncated"));
      }
      file.read(begin, destination + run.b * itemsize, bytes);
    }
  }

 private:
  ReadableFile& open(int index, const Path& path, const std::string& where) {
    auto& file = open_[index];
    if (file) return *file;
    // A checkpoint of thousands of ranks has more files than a process may have open.
    constexpr int kMostOpen = 200;
    if (++open_count_ > kMostOpen) {
      for (auto& other : open_) other.reset();
      open_count_ = 1;
    }
    if (!posix_file_system().exists(path)) throw CheckpointError(where + ": the file is missing");
    file = posix_file_system().open(path);
    return *file;
  }

  const CheckpointSource& source_;
  std::vector<std::unique_ptr<ReadableFile>> open_;  ///< [files]; nullptr: not now
  int open_count_ = 0;
};

}  // namespace

const char* layout_name(CheckpointLayout layout) {
  switch (layout) {
    case CheckpointLayout::kTrireme:
      return "Trireme";
    case CheckpointLayout::kDeepSpeed:
      return "DeepSpeed";
    case CheckpointLayout::kTorchDistributed:
      return "PyTorch DCP";
    case CheckpointLayout::kSafetensors:
      return "safetensors";
  }
  TRIREME_CHECK(false, "layout ", static_cast<int>(layout));
}

class TensorReader::Impl {
 public:
  explicit Impl(const CheckpointSource& source)
      : source_(source), plain_(source), shards_(posix_file_system(), source.folder, source.manifest) {}

  void read(size_t tensor, int64_t begin, int64_t numel, std::byte* destination) {
    const auto rounded = source_.rounded_from.find(tensor);
    if (rounded != source_.rounded_from.end())
      return read_rounded(source_.manifest.tensors.at(tensor), rounded->second, {begin, numel}, destination);
    const SavedTensor& saved = source_.manifest.tensors.at(tensor);
    const int64_t saved_numel = saved.slices.empty() ? 0 : checked_numel(saved.shape, saved.name);
    if (begin < 0 || numel < 0 || begin > saved_numel - numel) {
      throw CheckpointError(str(source_.folder.string(), ": tensor \"", saved.name, "\" has ", saved_numel,
                                " elements, [", begin, ", ", begin + numel, ") are asked for"));
    }
    for (SliceRead& read : plan_tensor_reads(saved, {saved.shape}, {begin, begin + numel})) {
      read.tensor = tensor;
      read_slice(read, destination);
    }
  }

 private:
  struct Range {
    int64_t begin;
    int64_t numel;
  };

  void read_rounded(const SavedTensor& tensor, size_t from, const Range& range, std::byte* destination) {
    constexpr int64_t kBlockNumel = int64_t{1} << 18;
    const at::ScalarType dtype = source_.manifest.tensors.at(from).dtype;
    at::Tensor block = at::empty({std::min(kBlockNumel, range.numel)}, at::TensorOptions().dtype(dtype));
    for (int64_t done = 0; done < range.numel; done += kBlockNumel) {
      const at::Tensor part = block.narrow(0, 0, std::min(kBlockNumel, range.numel - done));
      read(from, range.begin + done, part.numel(), static_cast<std::byte*>(part.data_ptr()));
      void* place = destination + done * static_cast<int64_t>(c10::elementSize(tensor.dtype));
      at::from_blob(place, {part.numel()}, at::TensorOptions().dtype(tensor.dtype)).copy_(part);
    }
  }

  void read_slice(const SliceRead& read, std::byte* destination) {
    if (source_.layout != CheckpointLayout::kTrireme) return plain_.read(read, destination);
    shards_.check_file(read);
    shards_.read(read, destination);
  }

  const CheckpointSource& source_;
  PlainReader plain_;
  ShardReader shards_;
};

TensorReader::TensorReader(const CheckpointSource& source) : impl_(std::make_unique<Impl>(source)) {}
TensorReader::~TensorReader() = default;

void TensorReader::read(size_t tensor, int64_t begin, int64_t numel, std::byte* destination) {
  impl_->read(tensor, begin, numel, destination);
}

}  // namespace trireme
