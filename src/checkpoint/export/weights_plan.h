// Which tensors of a checkpoint make up plain weights, and how they are spread over files: pure functions.
#pragma once

#include <c10/core/ScalarType.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "trireme/checkpoint/source.h"

namespace trireme {

struct WeightRequest {
  std::optional<at::ScalarType> dtype;  ///< of floating-point tensors; nullopt: as saved
  bool exclude_frozen_parameters = false;
  bool masters = false;  ///< where there is one, the master as it is; `dtype` is for the others
};

struct PlannedWeight {
  size_t tensor = 0;  ///< of Manifest::tensors: the weight itself or its master
  std::string name;   ///< without "model."
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  int64_t bytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
};

struct WeightsPlan {
  std::vector<PlannedWeight> weights;          ///< in the checkpoint's order
  std::map<std::string, std::string> aliases;  ///< other name -> name, of tied parameters that are in `weights`
};

/// Throws    CheckpointError: no weights; frozen parameters are to be left out and nothing tells which they are.
WeightsPlan plan_weights(const CheckpointSource& source, const WeightRequest& request);

/// Indices of `weights` by file, in order, each file of at most `max_bytes` unless one tensor is larger.
std::vector<std::vector<size_t>> spread_over_files(const std::vector<PlannedWeight>& weights, int64_t max_bytes);

}  // namespace trireme
