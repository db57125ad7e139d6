// Training on the fake device and on the host, step by step, for comparison.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/fake_device/fake_cuda.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/run_ranks.h"
#include "trireme/engine/engine.h"

namespace trireme::on_devices {

using namespace testing;

inline constexpr int kSteps = 6;

/// How a run is configured, over config_of()'s defaults.
using Configure = std::function<void(Config&)>;

inline Config config_of(int stage, at::ScalarType dtype, const Configure& configure, int ranks = 1) {
  Config config = default_config(ranks);
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 2e-3, .weight_decay = 0.05};
  config.precision.weight_dtype = dtype;
  config.gradient_clipping = 0.5;
  config.pager = harsh_policy(stage);
  if (configure) configure(config);
  return config;
}

struct Outcome {
  std::vector<double> losses, norms, rates, scales;
  int64_t skipped_steps = 0;
  int64_t offloaded_bytes = 0;
  std::map<std::string, at::Tensor> tensors;
};

/// Multiplies a loss, by step.
using Disturb = std::function<double(int)>;

/// kNcclFast: with NCCL's own sums, which the fake one makes in rank order, too.
enum class Place { kHost, kOneDevice, kNccl, kNcclFast, kIpc };

// Rank r has fake device r.
inline std::unique_ptr<Group> make_group(Rank& rank, Place place) {
  const c10::Device device = fake_device(rank.id());
  if (place == Place::kNccl)
    return make_fake_nccl_group(rank.world(), device, {.sums = NcclGroupOptions::Sums::kInRankOrder});
  if (place == Place::kNcclFast) return make_fake_nccl_group(rank.world(), device);
  return place == Place::kIpc ? make_fake_cuda_ipc_group(rank.world(), device) : nullptr;
}

/// Rank 0's losses, and what all ranks have alike.
inline Outcome train(const ModelCase& model_case, const Config& config, Place place, int ranks = 1,
                     const Disturb& disturb = {}) {
  Outcome outcome;
  run_ranks(ranks, [&](Rank& rank) {
    at::set_num_threads(1);
    TrainedModel model = model_case.make();
    if (place != Place::kHost) move_to_fake(*model.module, fake_device(rank.id()));
    const std::unique_ptr<Group> group = make_group(rank, place);
    Engine engine(group ? *group : rank.world(), *model.module, {.config = config});
    const bool records = rank.id() == 0;
    for (int step = 0; step < kSteps; ++step) {
      at::Tensor loss = model.loss({step * rank.size() + rank.id(), step});
      if (disturb) loss = loss * disturb(step);
      engine.backward(loss);
      engine.step();
      if (records) outcome.losses.push_back(loss.item<double>());
      if (records) outcome.norms.push_back(engine.get_global_grad_norm().value_or(0));
      if (records) outcome.rates.push_back(engine.get_lr());
      if (records) outcome.scales.push_back(engine.loss_scale());
    }
    if (records) outcome.skipped_steps = engine.skipped_steps();
    if (records) outcome.offloaded_bytes = engine.pager().memory().offloaded_bytes;
    engine.destroy();
    if (records)
      for (const auto& [name, tensor] : parameters_of(*model.module)) outcome.tensors[name] = tensor.cpu();
  });
  return outcome;
}

inline void expect_close(const std::vector<double>& actual, const std::vector<double>& expected, double tolerance,
                         const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_NEAR(actual[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i]))) << what << ", step " << i;
}

inline void expect_same(const Outcome& device, const Outcome& host, at::ScalarType dtype) {
  // In 16 bit the last bit of a master decides now and then how a weight is rounded.
  const double tolerance = dtype == at::kFloat ? 1e-5 : 2e-2;
  expect_close(device.losses, host.losses, tolerance, "loss");
  expect_close(device.norms, host.norms, tolerance, "norm");
  expect_close(device.rates, host.rates, 1e-6, "lr");
  EXPECT_EQ(device.scales, host.scales);
  EXPECT_EQ(device.skipped_steps, host.skipped_steps);
  for (const auto& [name, tensor] : host.tensors)
    EXPECT_TRUE(device.tensors.at(name).allclose(tensor, tolerance, tolerance)) << name;
}

inline const std::vector<ModelCase> kModels = {{"Mlp", make_mlp}, {"Llama", make_llama}, {"TiedNet", make_tied_net}};

}  // namespace trireme::on_devices
