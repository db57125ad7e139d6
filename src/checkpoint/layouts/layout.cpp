#include "checkpoint/layouts/layout.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "checkpoint/directory.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/checkpoint/checkpoint.h"

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

bool has_latest(const Path& folder) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(folder / "latest", ignored);
}

/// Where a checkpoint's folder `tag` may stand: under its name, or under another one while a save replaces it.
std::array<Path, 2> places_of_tag(const Path& folder, const std::string& tag) {
  return {folder / tag, folder / (".old-" + tag)};
}

/// Whether `path` is a checkpoint, or a folder in which `latest` names one.
bool leads_to_checkpoint(const Path& path) { return layout_of(path) || has_latest(path); }

/// The checkpoint that `latest` in `folder` names; nullopt: it names none that is complete.
std::optional<Path> checkpoint_of_latest(const Path& folder) {
  const std::string tag = latest_tag(folder).value_or("");
  if (!tag.empty())
    for (const Path& path : places_of_tag(folder, tag))
      if (layout_of(path)) return path;
  return std::nullopt;
}

/// The checkpoint of a folder that has weights as safetensors beside `latest`, as the Trainer of transformers writes
/// it: these weights may be rounded, and nothing vouches for their bytes.
Path checkpoint_beside_weights(const Path& folder) {
  const std::string tag = latest_tag(folder).value_or("");
  const std::string weights = str("; for the weights beside it give ", safetensors_weights(folder).string());
  if (const auto found = checkpoint_of_latest(folder)) {
    log(LogLevel::kWarning, str(folder.string(), ": `latest` names the checkpoint ", tag, ", which is taken", weights));
    return *found;
  }
  const std::vector<std::string> tags = tags_in(folder);
  std::error_code ignored;
  throw CheckpointError(str(folder.string(), ": `latest` names ", tag,
                            std::filesystem::exists(folder / tag, ignored)
                                ? ", which is no complete checkpoint: damaged"
                                : ", which is not there",
                            tags.empty() ? "" : str("; name one of its tags: ", tag_list(tags)), weights));
}

/// The checkpoint that the folder `path` stands for by itself, without a tag; nullopt: none.
std::optional<Path> checkpoint_of_folder(const Path& path) {
  const LayoutEntry* layout = layout_of(path);
  if (!has_latest(path)) return layout ? std::optional(path) : std::nullopt;
  if (layout) return layout->layout == CheckpointLayout::kSafetensors ? checkpoint_beside_weights(path) : path;
  return checkpoint_of_latest(path);
}

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
    if (name.starts_with(".") || !entry.is_directory(reason) || !leads_to_checkpoint(entry.path())) continue;
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
  if (!wanted.empty()) check_tag(wanted);
  std::optional<Path> found;
  if (wanted.empty()) {
    found = checkpoint_of_folder(path);
  } else {
    for (const Path& place : places_of_tag(path, wanted))
      if (!found) found = checkpoint_of_folder(place);
  }
  if (found) return *found;

  const std::string tag = wanted.empty() && has_latest(path) ? latest_tag(path).value_or("") : wanted;
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

CheckpointSource open_checkpoint(const Path& path, const std::string& tag) {
  const Path checkpoint = resolve_checkpoint(path, tag);
  return layout_of(checkpoint)->open(checkpoint);
}

}  // namespace trireme
