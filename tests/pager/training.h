// A small training loop on a pager alone: plain SGD on the owned slices, so that what is compared is the paging.
#pragma once

#include <torch/nn.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "trireme/intercept.h"
#include "trireme/pager/pager.h"

namespace trireme::testing {

inline std::vector<NamedParameter> parameters_of(const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& item : module.named_parameters()) parameters.push_back({item.key(), item.value()});
  return parameters;
}

/// One SGD step on what is owned; parameters without a gradient are left alone.
inline Window sgd_step(Pager& pager, double lr) {
  at::NoGradGuard no_grad;
  Window window = pager.close_window();
  for (const OwnedSlice& slice : pager.owned()) {
    for (const Placement& placement : pager.layout().units[slice.unit].parameters) {
      if (!window.touched[placement.index]) continue;
      const int64_t begin = std::max(placement.begin, slice.begin);
      const int64_t end = std::min(placement.end(), slice.begin + slice.weights.numel());
      if (begin >= end) continue;
      at::Tensor weights = slice.weights.narrow(0, begin - slice.begin, end - begin);
      weights.sub_(slice.gradients.narrow(0, begin - slice.begin, end - begin).to(weights.scalar_type()).mul(lr));
    }
    pager.publish(slice.unit);
  }
  pager.open_window();
  return window;
}

/// How parameters are sharded; every sharding test runs under all of them.
struct Sharding {
  std::string name;
  PagerPolicy policy;
};

inline std::vector<Sharding> all_shardings() {
  std::vector<Sharding> shardings;
  for (int stage = 0; stage < 3; ++stage) shardings.push_back({"stage" + std::to_string(stage), {.stage = stage}});
  shardings.push_back({"stage3shared", {.stage = 3, .gather = GatherPolicy::kShared}});
  // A limit of one byte: only the two largest units may be live, so that every unit is released and gathered many times.
  shardings.push_back({"stage3copy", {.stage = 3, .gather = GatherPolicy::kCopy, .live_bytes = 1, .poison = true}});
  for (Sharding& sharding : shardings) sharding.policy.units.merge_below_bytes = 0;
  return shardings;
}

}  // namespace trireme::testing
