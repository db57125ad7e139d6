// A module's parameters.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

#include "trireme/pager/pager.h"

namespace trireme::testing {

/// Copies, by name.
inline std::map<std::string, at::Tensor> parameters_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : module.named_parameters()) tensors[item.key()] = item.value().detach().clone();
  return tensors;
}

/// The parameters themselves, as a pager takes them.
inline std::vector<NamedParameter> named_parameters_of(const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& item : module.named_parameters()) parameters.push_back({item.key(), item.value()});
  return parameters;
}

}  // namespace trireme::testing
