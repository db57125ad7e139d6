// Checkpoints of torch.distributed.checkpoint, as FSDP2 and other users of get_state_dict() save them.
#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>

#include "checkpoint/layouts/dcp/metadata.h"
#include "checkpoint/layouts/layout.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/log.h"
#include "trireme/base/state_names.h"
#include "trireme/base/words.h"
#include "trireme/checkpoint/reshard.h"
#include "trireme/checkpoint/training_values.h"
#include "trireme/formats/pickle/torch_archive.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

using dcp::StoredEntry;
using dcp::StoredItem;
using Path = std::filesystem::path;

enum class EntryRole { kWeight, kState, kGroup, kValues, kRounded, kOther };

/// The meaning of an entry of the state dictionary.
struct Meaning {
  EntryRole role = EntryRole::kOther;
  std::string name;   ///< of the parameter; kGroup: the group's number
  std::string state;  ///< kState, kGroup: of the optimizer's state or option
};

template <size_t N>
bool is_one_of(const std::string& text, const std::array<const char*, N>& names) {
  return std::find(names.begin(), names.end(), text) != names.end();
}

/// The meaning of a key behind "optim": nested (state, NAME, STATE), or flat ("state.NAME.STATE").
Meaning optimizer_meaning(const std::vector<std::string>& path, size_t at) {
  if (path.size() == at + 3 && path[at] == "state") return {EntryRole::kState, path[at + 1], path[at + 2]};
  if (path.size() == at + 3 && path[at] == "param_groups") return {EntryRole::kGroup, path[at + 1], path[at + 2]};
  constexpr std::string_view kState = "state.";
  if (path.size() != at + 1 || !path[at].starts_with(kState)) return {};
  const size_t dot = path[at].rfind('.');
  if (dot < kState.size()) return {};
  return {EntryRole::kState, path[at].substr(kState.size(), dot - kState.size()), path[at].substr(dot + 1)};
}

/// The dictionaries of a model and of an optimizer, alone or in one of the application.
Meaning meaning_of(const StoredEntry& entry) {
  constexpr std::array kModels{"model", "module", "model_state_dict", "state_dict"};
  constexpr std::array kOptimizers{"optim", "optimizer", "optimizer_state_dict"};
  if (entry.key == dcp::kValuesName && !entry.is_tensor) return {EntryRole::kValues, {}, {}};
  if (entry.key == dcp::kRoundedName && !entry.is_tensor) return {EntryRole::kRounded, {}, {}};
  for (size_t at = 0; at < 2 && at + 1 < entry.path.size(); ++at) {
    if (is_one_of(entry.path[at], kModels))
      return {EntryRole::kWeight, joined(std::span(entry.path).subspan(at + 1), "."), {}};
    if (is_one_of(entry.path[at], kOptimizers)) return optimizer_meaning(entry.path, at + 1);
  }
  return {};
}

class DcpOpening {
 public:
  explicit DcpOpening(const Path& folder) {
    source_.layout = CheckpointLayout::kTorchDistributed;
    source_.folder = folder;
    source_.manifest.rank_values = {"{}"};
  }

  CheckpointSource run() {
    const std::vector<StoredEntry> entries = dcp::read_metadata(source_.folder / dcp::kMetadataName);
    const bool has_model = std::any_of(entries.begin(), entries.end(), [](const StoredEntry& entry) {
      return entry.is_tensor && meaning_of(entry).role == EntryRole::kWeight;
    });
    for (const StoredEntry& entry : entries) {
      Meaning meaning = meaning_of(entry);
      // The state dictionary of a model alone: its keys are the names.
      if (!has_model && entry.is_tensor && meaning.role == EntryRole::kOther)
        meaning = {EntryRole::kWeight, entry.key, {}};
      take(entry, meaning);
    }
    if (left_out_ > 0)
      log(LogLevel::kWarning, str(source_.folder.string(), ": ", left_out_,
                                  " tensors belong neither to a model nor to an optimizer and are left out, such as \"",
                                  first_left_out_, "\""));
    finish_values();
    return std::move(source_);
  }

 private:
  void take(const StoredEntry& entry, const Meaning& meaning) {
    switch (meaning.role) {
      case EntryRole::kWeight:
        if (entry.is_tensor) add_tensor(weight_name(meaning.name), entry);
        return;
      case EntryRole::kState:
        if (!entry.is_tensor) return;
        if (meaning.state == "step")
          values_.set_steps(meaning.name, static_cast<int64_t>(number_of(entry)));
        else {
          add_tensor(optimizer_state_name(meaning.state, meaning.name), entry);
          with_states_.insert(meaning.name);
        }
        return;
      case EntryRole::kGroup:
        take_option(entry, meaning);
        return;
      case EntryRole::kValues:
        own_values_ = archive_of(entry.items.at(0)).root().text;
        return;
      case EntryRole::kRounded:
        own_rounded_ = archive_of(entry.items.at(0)).root().text;
        return;
      case EntryRole::kOther:
        if (entry.is_tensor && left_out_++ == 0) first_left_out_ = entry.key;
        return;
    }
  }

  pickle::TorchArchive archive_of(const StoredItem& item) {
    return {source_.folder / item.file, item.begin, item.bytes};
  }

  double number_of(const StoredEntry& entry) {
    if (entry.items.size() != 1)
      throw CheckpointError(str(source_.folder.string(), ": \"", entry.key, "\": expected one number"));
    pickle::TorchArchive archive = archive_of(entry.items[0]);
    return archive.item(archive.root(), entry.key);
  }

  void take_option(const StoredEntry& entry, const Meaning& meaning) {
    constexpr std::array kOptions{"lr", "betas", "eps", "weight_decay", "momentum", "params"};
    if (!is_one_of(meaning.state, kOptions)) return;
    Json& group = groups_[{meaning.name.size(), meaning.name}];
    if (entry.is_tensor) {
      group[meaning.state] = number_of(entry);
      return;
    }
    pickle::TorchArchive archive = archive_of(entry.items.at(0));
    const pickle::Value& value = archive.root();
    if (value.is(pickle::Kind::kTensor))
      group[meaning.state] = archive.item(value, entry.key);
    else
      group[meaning.state == "params" ? "names" : meaning.state] = plain(value);
  }

  static Json plain(const pickle::Value& value) {
    switch (value.kind) {
      case pickle::Kind::kFloat:
        return value.real;
      case pickle::Kind::kInt:
        return value.integer;
      case pickle::Kind::kString:
        return value.text;
      case pickle::Kind::kList:
      case pickle::Kind::kTuple: {
        Json list = Json::array();
        for (const pickle::Value* item : value.items)
          if (item->items.empty()) list.push_back(plain(*item));
        return list;
      }
      default:
        return nullptr;
    }
  }

  void add_tensor(const std::string& name, const StoredEntry& entry) {
    SavedTensor tensor{name, entry.shape, entry.dtype, {}};
    const std::string where = str(source_.folder.string(), ": tensor \"", entry.key, "\"");
    const auto itemsize = static_cast<int64_t>(c10::elementSize(entry.dtype));
    for (const StoredItem& block : entry.items) {
      const int64_t offset = data_offset(entry, block, where);
      const int file = index_of_file(block.file);
      dcp::for_each_run(entry.shape, block, [&](int64_t begin, int64_t within, int64_t numel) {
        tensor.slices.push_back({.file = file,
                                 .begin = begin,
                                 .numel = numel,
                                 .offset = offset + within * itemsize,
                                 .bytes = numel * itemsize,
                                 .checksums = {}});
      });
    }
    std::sort(tensor.slices.begin(), tensor.slices.end(),
              [](const SavedSlice& a, const SavedSlice& b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (const SavedSlice& slice : tensor.slices) {
      if (slice.begin != end)
        throw CheckpointError(str(where, ": its chunks ", slice.begin > end ? "leave out" : "overlap at", " element ",
                                  std::min(end, slice.begin)));
      end += slice.numel;
    }
    if (end != checked_numel(entry.shape, entry.key))
      throw CheckpointError(str(where, ": its chunks end at element ", end));
    source_.manifest.tensors.push_back(std::move(tensor));
  }

  int64_t data_offset(const StoredEntry& entry, const StoredItem& block, const std::string& where) {
    pickle::TorchArchive archive = archive_of(block);
    const pickle::Value& tensor = archive.root();
    const int64_t offset = archive.offset_of(tensor, entry.key);
    if (tensor.place->shape != block.sizes || tensor.place->dtype != entry.dtype)
      throw CheckpointError(str(where, ": ", block.file, " holds a block of another shape or dtype at byte ",
                                block.begin, " than ", dcp::kMetadataName, " says"));
    return offset;
  }

  int index_of_file(const std::string& name) {
    const auto [found, is_new] = index_of_file_.try_emplace(name, static_cast<int>(source_.manifest.files.size()));
    if (is_new)
      source_.manifest.files.push_back({.name = name,
                                        .bytes = static_cast<int64_t>(posix_file_system().size(source_.folder / name)),
                                        .header_bytes = 0,
                                        .header_checksum = 0});
    return found->second;
  }

  /// Undoes the changes that write_torch_distributed() made for torch: a tied parameter stands under each of its names,
  /// and in the place of a 16-bit weight stands its master.
  void restore_own_tensors() {
    std::vector<SavedTensor>& tensors = source_.manifest.tensors;
    const std::map<std::string, std::string> aliases = parse_training_values(*own_values_).aliases;
    const auto weight_of = [](const SavedTensor& tensor) {
      const StateName name = parse_state_name(tensor.name);
      return name.kind == StateKind::kWeight ? std::string(name.parameter) : std::string();
    };
    std::erase_if(tensors, [&](const SavedTensor& tensor) { return aliases.contains(weight_of(tensor)); });
    const Json rounded = parse_plain_json(own_rounded_);
    for (size_t i = 0, count = tensors.size(); i < count; ++i) {
      const std::string name = weight_of(tensors[i]);
      if (!rounded.contains(name)) continue;
      const auto dtype = dtype_from_safetensors(rounded[name].get<std::string>(), source_.folder.string());
      source_.rounded_from.emplace(tensors.size(), i);
      tensors.push_back({tensors[i].name, tensors[i].shape, dtype, {}});
      tensors[i].name = master_name(name);
    }
  }

  void finish_values() {
    if (own_values_ && parse_plain_json(*own_values_).is_object()) {
      source_.manifest.values = *own_values_;
      restore_own_tensors();
      return;
    }
    int64_t most_steps = 0;
    for (const auto& [name, steps] : values_.steps) most_steps = std::max(most_steps, steps);
    values_.global_steps = values_.micro_steps = most_steps;
    values_.skipped_steps = values_.global_samples = 0;
    values_.client_state = "{}";
    for (auto& [number, options] : groups_) {
      GroupValues& group = values_.groups.emplace_back();
      group.names = options.value("names", std::vector<std::string>());
      options.erase("names");
      group.options = options.dump();
      values_.group_lrs.push_back(options.contains("lr") && options["lr"].is_number() ? options["lr"].get<double>()
                                                                                      : 0);
      add_missing_steps(group.names, most_steps);
    }
    values_.lr = values_.group_lrs.empty() ? 0 : values_.group_lrs[0];
    source_.manifest.values = to_text(values_);
  }

  /// torch counts the steps of some optimizers alone. A parameter with states has been stepped, one without has not.
  void add_missing_steps(const std::vector<std::string>& names, int64_t most_steps) {
    for (const std::string& name : names)
      if (!values_.steps.contains(name))
        values_.set_steps(name, with_states_.contains(name) ? std::max<int64_t>(most_steps, 1) : 0);
  }

  CheckpointSource source_;
  std::unordered_map<std::string, int> index_of_file_;
  TrainingValues values_;
  std::set<std::string> with_states_;                      ///< parameters
  std::map<std::pair<size_t, std::string>, Json> groups_;  ///< by their number: 2 before 10
  std::optional<std::string> own_values_;                  ///< as write_torch_distributed() keeps them
  std::string own_rounded_ = "{}";                         ///< the same: name of a weight -> its dtype
  int64_t left_out_ = 0;
  std::string first_left_out_;
};

}  // namespace

bool is_torch_distributed_checkpoint(const Path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path / dcp::kMetadataName, ignored);
}

CheckpointSource open_torch_distributed_checkpoint(const Path& path) { return DcpOpening(path).run(); }

}  // namespace trireme
