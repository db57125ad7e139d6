// The weights of a whole model in one file.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "training/stage_tensors.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/export.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/comm/parts.h"
#include "trireme/training/training.h"

namespace trireme {

namespace {

/// A parameter of which this rank's group has `own` in parts, where the group's first rank is asked for it: by rank 0,
/// as the first one of its stages; `own` in other groups.
at::Tensor to_whole(const TrainingGroups& groups, const std::vector<TensorPart>& parts, const at::Tensor& own) {
  Group& slices = *groups.slices;
  const RankGroups& stages = groups.plan.stages;
  return stages.of(slices.world_rank(0)).front() == 0 ? join_parts(slices, parts, own) : own;
}

/// `whole`, a tensor of stage `stage`, as rank 0 of all stages needs it: sent there, undefined on the others.
at::Tensor to_first_stage(Group* stages, int stage, const ParameterSpec& spec, at::Tensor whole) {
  if (stages == nullptr || stage == 0) return whole;
  if (stages->world_rank(0) != 0) return {};  // another data-parallel rank's stages
  if (stages->rank() == stage) stages->send(whole.cpu().contiguous(), 0).wait();
  if (stages->rank() != 0) return {};
  const at::Tensor received = at::empty(spec.shape, at::TensorOptions().dtype(spec.dtype));
  stages->recv(received, stage).wait();
  return received;
}

}  // namespace

void Training::export_weights(const std::filesystem::path& directory, const SaveModelOptions& options) {
  condition_.require_intact("save_16bit_model");
  if (directory.empty())
    throw ConfigError("save_16bit_model: the directory is empty; name the folder that the weights go into");
  check_export_format(options.name);
  if (program_slices_)
    throw ConfigError(
        "save_16bit_model: the program has cut its layers itself, over the axis \"model\", so what their "
        "whole is it alone knows; save_checkpoint() keeps the slices of each rank",
        ErrorCode::kUnsupported);
  const CallerScope caller("save_16bit_model");
  const WithoutInterception own_operators;
  take_user_writes();
  std::map<std::string, std::function<at::Tensor()>> mine;
  StageTensors here{.tensors = {}, .aliases = aliases_};
  for (size_t i = 0; i < pager_->parameters().size(); ++i) {
    const ParameterSpec& spec = pager_->parameters()[i];
    if (!spec.trainable && options.exclude_frozen_parameters) {
      std::erase_if(here.aliases, [&](const auto& alias) { return alias.second == spec.name; });
      continue;
    }
    here.tensors.push_back({spec.name, spec.model_part().shape, spec.dtype});
    mine.emplace(spec.name, [this, i] {
      const at::Tensor own = pager_->whole(static_cast<int>(i)).detach();
      return partition_ ? to_whole(groups_, partition_->parameters[i].parts, own) : own;
    });
  }
  for (const NamedBuffer& buffer : buffers_->all()) {
    here.tensors.push_back({buffer.name, buffer.tensor.sizes().vec(), buffer.tensor.scalar_type()});
    mine.emplace(buffer.name, [tensor = buffer.tensor.detach()] { return tensor; });
  }
  std::vector<ExportedTensor> tensors;
  ExportOptions files{.files = options.files};
  const std::vector<StageTensors> stages = tensors_of_stages(groups_.stages, here);
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    files.aliases.insert(stages[stage].aliases.begin(), stages[stage].aliases.end());
    for (const ParameterSpec& spec : stages[stage].tensors) {
      const auto own = mine.find(spec.name);
      const bool is_mine = own != mine.end();
      tensors.push_back({spec.name, spec.shape, spec.dtype, [this, stage, spec, own, is_mine] {
                           const at::Tensor whole = is_mine ? own->second() : at::Tensor();
                           return to_first_stage(groups_.stages, static_cast<int>(stage), spec, whole);
                         }});
    }
  }
  export_tensors(groups_.model, directory / options.name, tensors, files);
}

}  // namespace trireme
