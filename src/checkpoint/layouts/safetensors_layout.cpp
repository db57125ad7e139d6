// Plain weights: one safetensors file, or Hugging Face's folder of them with an index.
#include <map>
#include <unordered_set>

#include "checkpoint/layouts/layout.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/state_names.h"
#include "trireme/checkpoint/training_values.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kFileName = "model.safetensors";

/// Gathers the tensors of one or more files.
class WeightFiles {
 public:
  explicit WeightFiles(CheckpointSource& source) : source_(source), manifest_(source.manifest) {}

  /// Adds the tensors of file `name` that `wanted` says yes to; returns their names.
  template <class Wanted>
  std::unordered_set<std::string> add(const std::string& name, const Wanted& wanted) {
    const Path path = source_.folder / name;
    const SafetensorsHeader header = read_safetensors_header(posix_file_system(), path);
    if (const auto writer = header.metadata.find("written_by");
        writer != header.metadata.end() && writer->second == "trireme")
      throw CheckpointError(str(path.string(),
                                ": this is one shard of a checkpoint; give the folder of the checkpoint, "
                                "in which manifest.json is"));
    const int file = static_cast<int>(manifest_.files.size());
    manifest_.files.push_back({.name = name,
                               .bytes = static_cast<int64_t>(posix_file_system().size(path)),
                               .header_bytes = header.header_bytes,
                               .header_checksum = 0});
    std::unordered_set<std::string> names;
    for (const SafetensorsEntry& entry : header.entries) {
      names.insert(entry.name);
      if (!wanted(entry.name)) continue;
      const auto itemsize = static_cast<int64_t>(c10::elementSize(entry.dtype));
      const SavedSlice slice{.file = file,
                             .begin = 0,
                             .numel = entry.bytes / itemsize,
                             .offset = header.header_bytes + entry.offset,
                             .bytes = entry.bytes,
                             .checksums = {}};
      manifest_.tensors.push_back({weight_name(entry.name), entry.shape, entry.dtype, {slice}});
    }
    for (const auto& [alias, kept] : header.metadata)
      if (names.contains(kept) && !names.contains(alias)) aliases_.emplace(alias, kept);
    return names;
  }

  void finish() const { manifest_.values = to_text(TrainingValues{.aliases = aliases_}); }

 private:
  CheckpointSource& source_;
  Manifest& manifest_;
  std::map<std::string, std::string> aliases_;  ///< Python's `safetensors` notes tied tensors as other name -> name
};

}  // namespace

Path safetensors_weights(const Path& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    for (const char* name : {kIndexName, kFileName})
      if (std::filesystem::exists(path / name, ignored)) return path / name;
    return {};
  }
  const std::string name = path.filename().string();
  return name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") ? path : Path();
}

bool is_safetensors_checkpoint(const Path& path) { return !safetensors_weights(path).empty(); }

CheckpointSource open_safetensors_checkpoint(const Path& given) {
  const Path path = safetensors_weights(given);
  CheckpointSource source{
      .layout = CheckpointLayout::kSafetensors, .folder = path.parent_path(), .tag = {}, .manifest = {}};
  source.manifest.rank_values = {"{}"};
  WeightFiles files(source);
  if (path.extension() != ".json") {
    files.add(path.filename().string(), [](const std::string&) { return true; });
  } else {
    std::map<std::string, std::vector<std::string>> names_of_file;
    const auto index = read_safetensors_index(path);
    for (const auto& [name, file] : index) names_of_file[file].push_back(name);
    for (const auto& [file, names] : names_of_file) {
      const auto found = files.add(file, [&, &file = file](const std::string& name) {
        const auto entry = index.find(name);
        return entry != index.end() && entry->second == file;
      });
      for (const std::string& name : names)
        if (!found.contains(name))
          throw CheckpointError(str(path.string(), ": tensor \"", name, "\" is not in ", file));
    }
  }
  files.finish();
  return source;
}

}  // namespace trireme
