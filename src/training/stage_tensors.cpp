#include "training/stage_tensors.h"

#include <nlohmann/json.hpp>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/comm/agreement.h"

namespace trireme {

namespace {

std::string to_text(const StageTensors& stage) {
  Json tensors = Json::array();
  for (const ParameterSpec& tensor : stage.tensors)
    tensors.push_back({tensor.name, tensor.shape, static_cast<int>(tensor.dtype), tensor.trainable});
  return Json{{"tensors", tensors}, {"aliases", stage.aliases}}.dump();
}

StageTensors parse_stage(const std::string& text) {
  const Json json = Json::parse(text);
  StageTensors stage;
  for (const Json& tensor : json["tensors"])
    stage.tensors.push_back({tensor[0].get<std::string>(), tensor[1].get<std::vector<int64_t>>(),
                             static_cast<at::ScalarType>(tensor[2].get<int>()), tensor[3].get<bool>()});
  stage.aliases = json["aliases"].get<std::map<std::string, std::string>>();
  return stage;
}

}  // namespace

std::vector<StageTensors> tensors_of_stages(Group* stages, const StageTensors& mine) {
  if (stages == nullptr) return {mine};
  std::vector<StageTensors> all;
  std::map<std::string, int> stage_of;
  for (const std::string& text : gather_or_throw(*stages, [&] { return to_text(mine); })) {
    const int stage = static_cast<int>(all.size());
    for (const ParameterSpec& tensor : all.emplace_back(parse_stage(text)).tensors)
      if (const auto [known, is_new] = stage_of.emplace(tensor.name, stage); !is_new)
        throw ConfigError(str("'", tensor.name, "' is a tensor of stage ", known->second, " and of stage ", stage,
                              " of the pipeline; give them different names, or tie them (TiedLayer)"));
  }
  return all;
}

WholeModel whole_model(Group* stages, const std::vector<ParameterSpec>& mine) {
  WholeModel model;
  const std::vector<StageTensors> all = tensors_of_stages(stages, {mine, {}});
  for (size_t stage = 0; stage < all.size(); ++stage) {
    if (stages != nullptr && static_cast<int>(stage) == stages->rank()) model.first = model.parameters.size();
    model.parameters.insert(model.parameters.end(), all[stage].tensors.begin(), all[stage].tensors.end());
  }
  return model;
}

}  // namespace trireme
