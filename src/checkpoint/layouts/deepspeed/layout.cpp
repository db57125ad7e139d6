// A DeepSpeed checkpoint as a CheckpointSource: its flat tensors cut into parameters, where they stand in its files.
#include "checkpoint/layouts/layout.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/layouts/deepspeed/parts.h"
#include "trireme/base/error.h"
#include "trireme/base/state_names.h"
#include "trireme/checkpoint/reshard.h"

namespace trireme {
namespace deepspeed {

using pickle::TorchArchive;

int Builder::file(const TorchArchive& archive) {
  source.manifest.files.push_back({.name = archive.path().filename().string(), .bytes = archive.bytes()});
  return static_cast<int>(source.manifest.files.size()) - 1;
}

size_t Builder::add(const std::string& name, const std::vector<int64_t>& shape, at::ScalarType dtype,
                    std::vector<SavedSlice> slices) {
  source.manifest.tensors.push_back({name, shape, dtype, std::move(slices)});
  return source.manifest.tensors.size() - 1;
}

size_t Builder::add_whole(const std::string& name, TorchArchive& archive, const pickle::Value& tensor, int file) {
  const pickle::TensorPlace& place = *tensor.place;
  FlatSpace space;
  space.append({file, archive.offset_of(tensor, name), place.numel()});
  return add(name, place.shape, place.dtype,
             space.cut(0, place.numel(), 0, static_cast<int64_t>(c10::elementSize(place.dtype))));
}

namespace {

/// The place of every parameter's weights, or of one of its states.
class Cutter {
 public:
  Cutter(const std::vector<RankPart>& ranks, const std::vector<std::vector<Parameter>>& trained)
      : ranks_(ranks), trained_(trained) {}

  /// `state` empty: the weights. Calls visit(parameter, slices) for each parameter.
  template <class Visit>
  void cut(const std::string& state, const std::string& where, const Visit& visit) const {
    if (ranks_[0].stage == 3) return cut_by_parameter(state, where, visit);
    for (size_t group = 0; group < trained_.size(); ++group) {
      FlatSpace space;
      for (const RankPart& rank : ranks_) append(space, rank.groups[group], state, where);
      const auto& paddings = ranks_[0].paddings;
      int64_t begin = 0;
      for (size_t i = 0; i < trained_[group].size(); ++i) {
        const Parameter& parameter = trained_[group][i];
        require(begin + parameter.numel <= space.numel(), parameter, space, where);
        visit(parameter, space.cut(begin, parameter.numel, 0, sizeof(float)));
        begin += parameter.numel;
        if (group < paddings.size() && i < paddings[group].size()) begin += paddings[group][i];
      }
    }
  }

 private:
  template <class Visit>
  void cut_by_parameter(const std::string& state, const std::string& where, const Visit& visit) const {
    std::vector<FlatSpace> spaces(ranks_.size());
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      for (const FlatGroup& group : ranks_[rank].groups) append(spaces[rank], group, state, where);
    int64_t begin = 0;
    const auto count = static_cast<int64_t>(ranks_.size());
    for (const auto& group : trained_)
      for (const Parameter& parameter : group) {
        const int64_t part = (parameter.numel + count - 1) / count;
        std::vector<SavedSlice> slices;
        for (int64_t rank = 0; rank * part < parameter.numel; ++rank) {
          const int64_t first = rank * part;
          require(begin + part <= spaces[rank].numel(), parameter, spaces[rank], where);
          for (SavedSlice& slice :
               spaces[rank].cut(begin, std::min(part, parameter.numel - first), first, sizeof(float)))
            slices.push_back(std::move(slice));
        }
        visit(parameter, std::move(slices));
        begin += part;
      }
  }

  static void append(FlatSpace& space, const FlatGroup& group, const std::string& state, const std::string& where) {
    if (state.empty()) return space.append(group.weights);
    const auto found = group.states.find(state);
    if (found != group.states.end()) return space.append(found->second);
    if (group.weights.numel > 0)
      throw CheckpointError(
          str(where, ": the optimizer state ", state, " is there for some parameters and not for others"));
  }

  static void require(bool holds, const Parameter& parameter, const FlatSpace& space, const std::string& where) {
    if (holds) return;
    throw CheckpointError(str(where, ": the flat tensors end before \"", parameter.name, "\": they hold ",
                              space.numel(), " elements; files of several runs lie in one folder, or one is damaged"));
  }

  const std::vector<RankPart>& ranks_;
  const std::vector<std::vector<Parameter>>& trained_;
};

class Opening {
 public:
  explicit Opening(const std::filesystem::path& folder) : folder_(folder), names_(find_files(folder)) {
    builder_.source.layout = CheckpointLayout::kDeepSpeed;
    builder_.source.folder = folder;
    builder_.source.tag = folder.filename().string();
  }

  CheckpointSource run() {
    TorchArchive archive(folder_ / names_.model.at(0));
    model_ = read_model(archive, names_.weights_are_sharded);
    model_file_ = builder_.file(archive);
    for (const std::string& name : model_.buffers)
      builder_.add_whole(weight_name(name), archive, *model_.module.at(name), model_file_);
    read_optimizer(archive);
    add_trained(archive);
    if (names_.weights_are_sharded) {
      add_frozen_parts(archive);
    } else {
      add_frozen(archive);
    }
    Manifest& manifest = builder_.source.manifest;
    const TrainingValues values = values_of(archive, model_, ranks_[0], trained_);
    manifest.values = to_text(values);
    manifest.topology = {{"data", static_cast<int>(ranks_.size())}};
    manifest.rank_values.assign(ranks_.size(), "{}");
    manifest.software = Json{{"deepspeed", Json::parse(values.others)["deepspeed"]["version"]}}.dump();
    return std::move(builder_.source);
  }

 private:
  void read_optimizer(TorchArchive& archive) {
    if (names_.optimizer.empty()) {
      TrainedPart zero = read_stage_zero(archive, model_file_, model_);
      trained_ = std::move(zero.trained);
      ranks_.push_back(std::move(zero.part));
      return;
    }
    trained_ = model_.trained;
    for (const std::string& name : names_.optimizer) {
      TorchArchive part(folder_ / name);
      ranks_.push_back(read_rank(part, builder_.file(part)));
      const RankPart& rank = ranks_.back();
      if (rank.stage != ranks_[0].stage || rank.groups.size() != trained_.size() ||
          (rank.stage == 3) != names_.weights_are_sharded) {
        throw CheckpointError(str((folder_ / name).string(), ": ZeRO stage ", rank.stage, " with ", rank.groups.size(),
                                  " flat tensors, ", names_.model[0], " has ", trained_.size(),
                                  " groups: files of several runs lie in one folder"));
      }
    }
    const pickle::Value* ranks = archive.root().find("dp_world_size");
    if (ranks && ranks->is(pickle::Kind::kInt) && ranks->integer != static_cast<int64_t>(ranks_.size()))
      throw CheckpointError(str(folder_.string(), ": saved by ", ranks->integer, " ranks, but there are ",
                                ranks_.size(), " files *_optim_states.pt"));
  }

  /// A parameter's weights in its own dtype and, where these have 16 bits, its master; then its states.
  void add_trained(TorchArchive& archive) {
    const Cutter cutter(ranks_, trained_);
    const std::string where = folder_.string();
    cutter.cut("", where, [&](const Parameter& parameter, std::vector<SavedSlice> slices) {
      const auto found = model_.module.find(parameter.name);
      if (found == model_.module.end())
        throw CheckpointError(
            str(archive.path().string(), ": module has no \"", parameter.name, "\", param_shapes has"));
      trained_names_.insert(parameter.name);
      const at::ScalarType dtype = found->second->place->dtype;
      if (dtype == at::kFloat) {
        builder_.add(weight_name(parameter.name), parameter.shape, dtype, std::move(slices));
        return;
      }
      const size_t master = builder_.add(master_name(parameter.name), parameter.shape, at::kFloat, std::move(slices));
      if (!names_.weights_are_sharded) {
        if (found->second->place->shape != parameter.shape)
          throw CheckpointError(str(archive.path().string(), ": \"", parameter.name,
                                    "\" has another shape in module than in param_shapes"));
        builder_.add_whole(weight_name(parameter.name), archive, *found->second, model_file_);
        return;
      }
      builder_.source.rounded_from.emplace(builder_.add(weight_name(parameter.name), parameter.shape, dtype, {}),
                                           master);
    });
    std::set<std::string> states;
    for (const FlatGroup& group : ranks_[0].groups)
      for (const auto& [state, piece] : group.states) states.insert(state);
    for (const std::string& state : states)
      cutter.cut(state, where, [&](const Parameter& parameter, std::vector<SavedSlice> slices) {
        builder_.add(optimizer_state_name(state, parameter.name), parameter.shape, at::kFloat, std::move(slices));
      });
  }

  void add_frozen(TorchArchive& archive) {
    for (const std::string& name : model_.names)
      if (!trained_names_.contains(name))
        builder_.add_whole(weight_name(name), archive, *model_.module.at(name), model_file_);
  }

  /// ZeRO stage 3: every rank's model file holds its part of each frozen parameter.
  void add_frozen_parts(TorchArchive& first) {
    if (model_.frozen.empty()) return;
    const auto count = static_cast<int64_t>(names_.model.size());
    std::vector<std::vector<SavedSlice>> slices(model_.frozen.size());
    std::vector<at::ScalarType> dtypes(model_.frozen.size());
    for (int64_t rank = 0; rank < count; ++rank) {
      std::unique_ptr<TorchArchive> other;
      if (rank > 0) other = std::make_unique<TorchArchive>(folder_ / names_.model[rank]);
      TorchArchive& archive = other ? *other : first;
      const int file = other ? builder_.file(archive) : model_file_;
      const pickle::Value& fragments =
          required(archive.root(), "frozen_param_fragments", pickle::Kind::kDict, archive.path().string());
      for (size_t i = 0; i < model_.frozen.size(); ++i) {
        const Parameter& parameter = model_.frozen[i];
        const int64_t part = (parameter.numel + count - 1) / count;
        const int64_t numel = std::clamp<int64_t>(parameter.numel - rank * part, 0, part);
        const pickle::Value& fragment =
            required(fragments, parameter.name.c_str(), pickle::Kind::kTensor, archive.path().string());
        const int64_t offset = archive.offset_of(fragment, parameter.name);
        if (fragment.place->numel() < numel)
          throw CheckpointError(str(archive.path().string(), ": frozen_param_fragments[\"", parameter.name, "\"] has ",
                                    fragment.place->numel(), " elements, expected ", part));
        dtypes[i] = fragment.place->dtype;
        FlatSpace space;
        space.append({file, offset, numel});
        for (SavedSlice& slice : space.cut(0, numel, rank * part, static_cast<int64_t>(c10::elementSize(dtypes[i]))))
          slices[i].push_back(std::move(slice));
      }
    }
    for (size_t i = 0; i < model_.frozen.size(); ++i)
      builder_.add(weight_name(model_.frozen[i].name), model_.frozen[i].shape, dtypes[i], std::move(slices[i]));
  }

  const std::filesystem::path folder_;
  const FileNames names_;
  ModelPart model_;
  std::vector<RankPart> ranks_;
  std::vector<std::vector<Parameter>> trained_;  ///< by flat group
  std::set<std::string> trained_names_;
  Builder builder_;
  int model_file_ = 0;  ///< the first of them, of Manifest::files
};

}  // namespace
}  // namespace deepspeed

CheckpointSource open_deepspeed_checkpoint(const std::filesystem::path& path) { return deepspeed::Opening(path).run(); }

}  // namespace trireme
