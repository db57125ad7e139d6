// A load in four steps, each of which succeeds on all ranks or throws on all: find, match, check the files, read.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "checkpoint/agreement.h"
#include "checkpoint/directory.h"
#include "checkpoint/layouts/layout.h"
#include "checkpoint/shard.h"
#include "checkpoint/slices.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

/// Names in a message are cut after so many.
constexpr size_t kNamesShown = 8;

/// Rank 0 finds and reads for all, so that all see the same even when somebody saves meanwhile.
struct Found {
  std::string tag;  ///< empty: nothing to resume from
  Path path;
  std::string manifest;
};

/// What lies at `path` is a checkpoint, but not one that a load from `directory` takes: starting anew would be wrong.
void refuse_what_else_it_is(const Path& directory, const Path& path) {
  const LayoutEntry* layout = layout_of(path);
  if (!layout) return;
  if (layout->layout == CheckpointLayout::kTrireme)
    throw CheckpointError(str(path.string(), ": this folder is a checkpoint itself; load from ",
                              path.parent_path().string(), " with the tag ", path.filename().string()));
  throw CheckpointError(str(path.string(), ": this is a checkpoint of ", layout_name(layout->layout),
                            "; make one of ours with `trireme convert ", directory.string(),
                            " NEW_FOLDER --to trireme`"));
}

std::string find(FileSystem& files, const Path& directory, const std::string& wanted) {
  if (std::filesystem::is_regular_file(directory))
    throw IoError(str(directory.string(), ": expected a folder of checkpoints, found a file"));
  std::string tag = wanted;
  if (tag.empty()) {
    const auto latest = latest_tag(directory);
    const auto tags = latest ? std::vector<std::string>() : complete_tags(directory);
    // Starting anew beside finished checkpoints would lose them without a word.
    if (!tags.empty())
      throw CheckpointError(str(directory.string(), ": no file `latest`, but complete checkpoints; the newest is ",
                                tags.back(), ": name the tag to load"));
    if (!latest) {
      refuse_what_else_it_is(directory, directory);
      return "\n\n";
    }
    tag = *latest;
  }
  check_tag(tag);
  if (!files.exists(directory / tag / "manifest.json")) refuse_what_else_it_is(directory, directory / tag);
  const Path path = find_checkpoint(files, directory, tag);
  return tag + '\n' + path.string() + '\n' + files.read(path / "manifest.json");
}

Found split_found(const std::string& text) {
  const size_t tag_end = text.find('\n');
  const size_t path_end = text.find('\n', tag_end + 1);
  return {text.substr(0, tag_end), text.substr(tag_end + 1, path_end - tag_end - 1), text.substr(path_end + 1)};
}

std::string names_text(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kNamesShown); ++i) text += (i ? ", " : "") + names[i];
  return names.size() > kNamesShown ? str(text, ", and ", names.size() - kNamesShown, " more") : text;
}

/// Adds to `all` what it does not have yet, in order.
void merge(std::vector<std::string>& all, std::unordered_set<std::string>& seen, const Json& names) {
  for (const auto& name : names)
    if (seen.insert(name.get<std::string>()).second) all.push_back(name.get<std::string>());
}

/// Names that a rank's destination has and the checkpoint does not. Throws when checkpoint and destinations of all
/// ranks do not hold the same names, as far as the options refuse that.
std::vector<std::string> match_names(Group& group, const Manifest& manifest, const std::vector<SliceSpec>& wanted,
                                     const LoadOptions& options, const Path& path) {
  const auto texts = gather_or_throw(group, [&] {
    std::unordered_set<std::string> saved, asked;
    Json missing = Json::array(), used = Json::array();
    for (const auto& tensor : manifest.tensors) saved.insert(tensor.name);
    for (const auto& slice : wanted)
      if (asked.insert(slice.name).second) (saved.contains(slice.name) ? used : missing).push_back(slice.name);
    return Json{{"missing", missing}, {"used", used}}.dump();
  });
  std::vector<std::string> missing, used, extra;
  std::unordered_set<std::string> seen_missing, seen_used;
  for (const auto& text : texts) {
    const Json names = Json::parse(text);
    merge(missing, seen_missing, names["missing"]);
    merge(used, seen_used, names["used"]);
  }
  for (const auto& tensor : manifest.tensors)
    if (!seen_used.contains(tensor.name)) extra.push_back(tensor.name);

  std::string problem;
  const auto optional = options.optional ? options.optional(manifest.values) : std::set<std::string>();
  std::vector<std::string> required;
  std::copy_if(missing.begin(), missing.end(), std::back_inserter(required),
               [&](const std::string& name) { return !optional.contains(name); });
  if (options.missing == Mismatch::kIgnore) required.clear();
  if (options.extra == Mismatch::kIgnore) extra.clear();
  if (!required.empty())
    problem += str("; ", required.size(), " expected and not in the checkpoint: ", names_text(required));
  if (!extra.empty()) problem += str("; ", extra.size(), " in the checkpoint and not expected: ", names_text(extra));
  const auto is_state = [](const std::string& name) { return name.starts_with("optimizer."); };
  if (std::any_of(required.begin(), required.end(), is_state) || std::any_of(extra.begin(), extra.end(), is_state))
    problem += "; where another optimizer saved it, load without optimizer states";
  if (!problem.empty()) throw CheckpointError(str(path.string(), " has other tensors than this model", problem));
  return missing;
}

/// Runs `work` on the files of `found`; where they are damaged, the error names the other checkpoints too.
template <class Work>
auto with_alternatives(const Path& directory, const Found& found, const Work& work) {
  try {
    return work();
  } catch (const CheckpointError& error) {
    auto tags = complete_tags(directory);
    std::erase(tags, found.tag);
    if (tags.empty()) throw;
    std::reverse(tags.begin(), tags.end());
    throw CheckpointError(str(error.what(), "; beside it, newest first: ", names_text(tags)), error.code());
  }
}

void read_all(ShardReader& reader, const std::vector<SliceRead>& reads, StateTree& destination) {
  for (const SliceRead& read : reads) {
    const at::Tensor& data = destination.tensors[read.destination].data;
    reader.read(read, static_cast<std::byte*>(data.data_ptr()) + read.destination_begin * data.element_size());
  }
}

}  // namespace

std::optional<LoadedCheckpoint> load_checkpoint(Group& group, const Path& directory, const std::string& tag,
                                                StateTree& destination, const LoadOptions& options) {
  FileSystem& files = options.files ? *options.files : posix_file_system();
  const Found found = split_found(broadcast_or_throw(group, [&] { return find(files, directory, tag); }));
  if (found.tag.empty()) return std::nullopt;

  const Manifest manifest = with_alternatives(
      directory, found, [&] { return parse_manifest(found.manifest, (found.path / "manifest.json").string()); });
  std::vector<SliceSpec> wanted;
  std::vector<SliceRead> reads;
  ShardReader reader(files, found.path, manifest);
  all_or_throw(group, [&] {
    wanted = slices_of(destination);
    reads = plan_reads(manifest, wanted);
  });
  std::vector<std::string> missing = match_names(group, manifest, wanted, options, found.path);
  all_or_throw(group, [&] {
    with_alternatives(directory, found, [&] {
      for (const SliceRead& read : reads) reader.check_file(read);
      if (options.verify == Verify::kFirst)
        for (const SliceRead& read : reads) reader.read(read, nullptr);
    });
  });
  try {
    all_or_throw(group, [&] { with_alternatives(directory, found, [&] { read_all(reader, reads, destination); }); });
  } catch (const CommError&) {
    throw;
  } catch (const Error& error) {
    // Some rank has read something by now: whatever went wrong, the ranks together hold a mixture.
    throw CheckpointError(error.what(), ErrorCode::kTornLoad);
  }
  return LoadedCheckpoint{found.tag, manifest.values, manifest.rank_values, std::move(missing)};
}

}  // namespace trireme
