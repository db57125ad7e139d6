// A load in four steps, each of which succeeds on all ranks or throws on all: find, match, check the files, read.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "checkpoint/directory.h"
#include "checkpoint/layouts/layout.h"
#include "checkpoint/shard.h"
#include "checkpoint/slices.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/log.h"
#include "trireme/base/state_names.h"
#include "trireme/comm/agreement.h"

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

/// A checkpoint at `path` that a load from `directory` does not take is refused: starting anew would be wrong.
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

/// The names that `own` gives on each rank, in the order of ranks, each once.
template <class Own>
std::vector<std::string> names_of_all(Group& group, const Own& own) {
  std::vector<std::string> names;
  std::unordered_set<std::string> seen;
  for (const std::string& text : gather_or_throw(group, [&] { return Json(own()).dump(); }))
    for (const auto& name : Json::parse(text))
      if (seen.insert(name.get<std::string>()).second) names.push_back(name.get<std::string>());
  return names;
}

/// Names of this rank's destination that the checkpoint does not have.
std::vector<std::string> missing_names(const std::unordered_set<std::string_view>& saved,
                                       const std::vector<SliceSpec>& wanted) {
  std::vector<std::string> missing;
  std::unordered_set<std::string_view> asked;
  for (const SliceSpec& slice : wanted)
    if (!saved.contains(slice.name) && asked.insert(slice.name).second) missing.push_back(slice.name);
  return missing;
}

/// Names of the checkpoint that no rank's destination has.
std::vector<std::string> extra_names(Group& group, const Manifest& manifest, const std::vector<SliceSpec>& wanted) {
  std::unordered_set<std::string_view> asked;
  for (const SliceSpec& slice : wanted) asked.insert(slice.name);
  const auto count = static_cast<int64_t>(manifest.tensors.size());
  const at::Tensor used = at::zeros({count}, at::kInt);
  for (int64_t i = 0; i < count; ++i) used.data_ptr<int>()[i] = asked.contains(manifest.tensors[i].name);
  if (count > 0) group.all_reduce(used, ReduceOp::kMax).wait();
  std::vector<std::string> extra;
  for (int64_t i = 0; i < count; ++i)
    if (used.const_data_ptr<int>()[i] == 0) extra.push_back(manifest.tensors[i].name);
  return extra;
}

/// Fills `loaded.missing`. Throws when checkpoint and destinations of all ranks do not hold the same names, as far as
/// the options refuse that.
void match_names(Group& group, const Manifest& manifest, const std::vector<SliceSpec>& wanted,
                 const LoadOptions& options, const Path& path, LoadedCheckpoint& loaded) {
  std::unordered_set<std::string_view> saved;
  for (const SavedTensor& tensor : manifest.tensors) saved.insert(tensor.name);
  std::vector<std::string> missing;
  loaded.missing = names_of_all(group, [&] { return missing = missing_names(saved, wanted); });
  std::vector<std::string> extra = extra_names(group, manifest, wanted);

  std::string problem;
  // A rank knows which of its own destinations may be missing: a stage has none of the others' parameters.
  std::vector<std::string> required = names_of_all(group, [&] {
    if (!options.optional) return missing;
    const std::set<std::string> optional = options.optional(loaded);
    std::erase_if(missing, [&](const std::string& name) { return optional.contains(name); });
    return missing;
  });
  if (options.missing == Mismatch::kIgnore) required.clear();
  if (options.extra == Mismatch::kIgnore) extra.clear();
  if (!required.empty())
    problem += str("; ", required.size(), " expected and not in the checkpoint: ", names_text(required));
  if (!extra.empty()) problem += str("; ", extra.size(), " in the checkpoint and not expected: ", names_text(extra));
  const auto is_state = [](const std::string& name) {
    return parse_state_name(name).kind == StateKind::kOptimizerState;
  };
  if (std::any_of(required.begin(), required.end(), is_state) || std::any_of(extra.begin(), extra.end(), is_state))
    problem += "; where another optimizer saved it, load without optimizer states";
  if (!problem.empty()) throw CheckpointError(str(path.string(), " has other tensors than this model", problem));
}

LoadedCheckpoint values_of(const Manifest& manifest, const std::string& tag) {
  LoadedCheckpoint loaded{.tag = tag,
                          .values = manifest.values,
                          .tensor_values = {},
                          .topology = manifest.topology,
                          .rank_values = manifest.rank_values,
                          .missing = {}};
  for (const SavedTensor& tensor : manifest.tensors)
    if (!tensor.values.empty()) loaded.tensor_values.emplace_back(tensor.name, tensor.values);
  return loaded;
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
    const TensorSlice& slice = destination.tensors[read.destination];
    if (slice.store)
      reader.read(read, [&](int64_t begin, std::span<const std::byte> bytes) { slice.store->write({begin}, bytes); });
    else
      reader.read(read, static_cast<std::byte*>(slice.data.data_ptr()));
  }
}

/// Optimizer states whose floating dtype is another than the saved one are read into tensors of that, and converted
/// when every rank has read everything.
class ConvertedStates {
 public:
  ConvertedStates(const Manifest& manifest, StateTree& destination) : destination_(destination) {
    std::unordered_map<std::string_view, at::ScalarType> dtype_of;
    for (const SavedTensor& tensor : manifest.tensors) dtype_of.emplace(tensor.name, tensor.dtype);
    for (size_t i = 0; i < destination.tensors.size(); ++i) {
      TensorSlice& slice = destination.tensors[i];
      const auto saved = dtype_of.find(slice.name);
      if (slice.store || saved == dtype_of.end() || !is_converted(slice, saved->second)) continue;
      originals_.emplace_back(i, slice.data);
      slice.data = at::empty(slice.data.sizes(), saved->second);
    }
  }
  ConvertedStates(const ConvertedStates&) = delete;
  ConvertedStates& operator=(const ConvertedStates&) = delete;
  ~ConvertedStates() {
    for (auto& [index, original] : originals_) destination_.tensors[index].data = std::move(original);
  }

  void convert() const {
    const at::NoGradGuard no_grad;
    for (const auto& [index, original] : originals_) original.copy_(destination_.tensors[index].data);
  }
  /// For the log; empty: nothing is converted.
  std::string text(const std::string& tag) const {
    if (originals_.empty()) return "";
    const auto& [index, original] = originals_.front();
    return str("load_checkpoint: optimizer states of '", tag, "' are in ",
               at::toString(destination_.tensors[index].data.scalar_type()), " and become ",
               at::toString(original.scalar_type()), ": ", originals_.size(), " tensors on this rank");
  }

 private:
  static bool is_converted(const TensorSlice& slice, at::ScalarType saved) {
    return parse_state_name(slice.name).kind == StateKind::kOptimizerState && slice.data.scalar_type() != saved &&
           at::isFloatingType(slice.data.scalar_type()) && at::isFloatingType(saved);
  }

  StateTree& destination_;
  std::vector<std::pair<size_t, at::Tensor>> originals_;  ///< by index in the destination
};

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
  const ConvertedStates states(manifest, destination);
  all_or_throw(group, [&] {
    wanted = slices_of(destination);
    reads = plan_reads(manifest, wanted);
  });
  LoadedCheckpoint loaded = values_of(manifest, found.tag);
  match_names(group, manifest, wanted, options, found.path, loaded);
  all_or_throw(group, [&] {
    with_alternatives(directory, found, [&] {
      for (const SliceRead& read : reads) reader.check_file(read);
      if (options.verify == Verify::kFirst)
        for (const SliceRead& read : reads) reader.read(read, ShardReader::Take());
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
  states.convert();
  if (const std::string text = states.text(found.tag); !text.empty() && group.rank() == 0) log(LogLevel::kInfo, text);
  return loaded;
}

}  // namespace trireme
