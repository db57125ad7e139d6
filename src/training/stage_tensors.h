// Names, shapes and dtypes of all tensors of a model in stages, which one rank has only of its own stage.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/pager/layout/layout.h"

namespace trireme {

/// Names, shapes and dtypes of one stage's tensors.
struct StageTensors {
  std::vector<ParameterSpec> tensors;
  std::map<std::string, std::string> aliases;  ///< other name -> name
};

/// Those of all stages, in their order: `mine` alone where `stages` is null. Collective over `stages`.
/// Throws    ConfigError on every rank: a name that two stages have.
std::vector<StageTensors> tensors_of_stages(Group* stages, const StageTensors& mine);

/// The parameters of all stages, in their order.
struct WholeModel {
  std::vector<ParameterSpec> parameters;
  size_t first = 0;  ///< index of this rank's first one
};

/// Collective and throws as tensors_of_stages().
WholeModel whole_model(Group* stages, const std::vector<ParameterSpec>& mine);

}  // namespace trireme
