#include "trireme/checkpoint/source.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "checkpoint/directory.h"
#include "checkpoint/layouts/layout.h"
#include "checkpoint/shard.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/reshard.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

constexpr std::array kLayouts{
    LayoutEntry{CheckpointLayout::kTrireme, "manifest.json", is_trireme_checkpoint, open_trireme_checkpoint},
    LayoutEntry{CheckpointLayout::kDeepSpeed, "mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt",
                is_deepspeed_checkpoint, open_deepspeed_checkpoint},
    LayoutEntry{CheckpointLayout::kTorchDistributed, ".metadata", is_torch_distributed_checkpoint,
                open_torch_distributed_checkpoint},
    LayoutEntry{CheckpointLayout::kSafetensors, "model.safetensors or model.safetensors.index.json",
                is_safetensors_checkpoint, open_safetensors_checkpoint},
};

std::string tag_list(const std::vector<std::string>& tags) {
  std::string text;
  for (const auto& tag : tags) text += (text.empty() ? "" : ", ") + tag;
  return text;
}

/// `folder`/`tag`, or what stands for it while a save replaces it.
std::optional<Path> checkpoint_of_tag(const Path& folder, const std::string& tag) {
  for (const Path& path : {folder / tag, folder / (".old-" + tag)})
    if (layout_of(path)) return path;
  return std::nullopt;
}

/// Reads from files whose bytes nothing vouches for. Their tensors have no parts, so a run is one stretch.
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

std::span<const LayoutEntry> known_layouts() { return kLayouts; }

const LayoutEntry* layout_of(const Path& path) {
  const auto found =
      std::find_if(kLayouts.begin(), kLayouts.end(), [&](const LayoutEntry& entry) { return entry.recognises(path); });
  return found == kLayouts.end() ? nullptr : &*found;
}

std::vector<std::string> tags_in(const Path& folder) {
  struct Found {
    std::filesystem::file_time_type written;
    std::string tag;
    // As complete_tags(): two saves within the clock's resolution, step9 before step10.
    auto key() const { return std::tuple(written, tag.size(), std::string_view(tag)); }
  };
  std::vector<Found> found;
  std::error_code reason;
  for (const auto& entry : std::filesystem::directory_iterator(folder, reason)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(".") || !entry.is_directory(reason) || !layout_of(entry.path())) continue;
    found.push_back({std::filesystem::last_write_time(entry.path(), reason), name});
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.key() < b.key(); });
  std::vector<std::string> tags;
  for (auto& item : found) tags.push_back(std::move(item.tag));
  return tags;
}

Path resolve_checkpoint(const Path& given, const std::string& wanted) {
  std::error_code ignored;
  const Path path = std::filesystem::weakly_canonical(given, ignored);
  if (!std::filesystem::exists(path, ignored))
    throw CheckpointError(str(given.string(), ": there is no such file or folder"));
  if (wanted.empty() && layout_of(path)) return path;
  std::string tag = wanted;
  if (tag.empty() && std::filesystem::is_directory(path, ignored)) tag = latest_tag(path).value_or("");
  if (!tag.empty()) check_tag(tag);
  if (const auto found = tag.empty() ? std::nullopt : checkpoint_of_tag(path, tag)) return *found;

  const std::vector<std::string> tags = tags_in(path);
  if (!tags.empty()) {
    throw CheckpointError(
        str((path / tag).string(), ": ",
            tag.empty() ? "no file `latest` says which checkpoint of this folder is meant" : "no complete checkpoint",
            "; name one of its tags: ", tag_list(tags)));
  }
  std::string signs;
  for (const LayoutEntry& entry : kLayouts)
    signs += str(signs.empty() ? "" : ", ", entry.sign, " (", layout_name(entry.layout), ")");
  throw CheckpointError(str((tag.empty() ? path : path / tag).string(),
                            ": no checkpoint of a known layout; looked for ", signs,
                            tag.empty() ? ", and for `latest`, which names one in this folder" : ""));
}

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

CheckpointSource open_checkpoint(const Path& path, const std::string& tag) {
  const Path checkpoint = resolve_checkpoint(path, tag);
  return layout_of(checkpoint)->open(checkpoint);
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
