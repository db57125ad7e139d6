// Programs of torch::optim on shards train as one process does with all ranks' samples.
#include "trireme/fsdp/fully_shard.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/parameters.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

constexpr int64_t kWidth = 12, kSamples = 8;
constexpr int kSteps = 5;
constexpr double kTolerance = 1e-5;

class Net : public torch::nn::Module {
 public:
  Net() {
    layers = register_module("layers", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) layers->push_back(torch::nn::Linear(kWidth, kWidth));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    const at::NoGradGuard no_grad;
    const at::Generator generator = at::detail::createCPUGenerator(3);
    for (const at::Tensor& parameter : parameters()) parameter.copy_(at::randn(parameter.sizes(), generator) * 0.3);
  }
  at::Tensor loss(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& layer : *layers) y = y + layer->as<torch::nn::LinearImpl>()->forward(norm->forward(y)).tanh();
    return (y - 1).square().mean();
  }

  torch::nn::ModuleList layers{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

at::Tensor samples(int step) {
  return at::randn({kSamples, kWidth}, at::detail::createCPUGenerator(static_cast<uint64_t>(100 + step)));
}

struct Outcome {
  std::vector<double> norms;
  std::map<std::string, at::Tensor> gradients, weights;  ///< gradients: of the first step, before clipping
};

struct Program {
  double max_norm = 0.1;
  int passes = 1;  ///< of a step
  FullyShardPolicy policy = {.units = {"layers[.][0-9]+"}};
  bool has_groups = false, is_sgd = false;
};

std::vector<torch::optim::OptimizerParamGroup> groups_of(Net& net) {
  std::vector<at::Tensor> matrices, others;
  for (const at::Tensor& parameter : net.parameters()) (parameter.dim() > 1 ? matrices : others).push_back(parameter);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices);
  groups.emplace_back(others,
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.05).weight_decay(0)));
  return groups;
}

const torch::optim::AdamWOptions kAdamW = torch::optim::AdamWOptions(0.02).weight_decay(0.1).eps(1e-4);
const torch::optim::SGDOptions kSgd = torch::optim::SGDOptions(0.2).momentum(0.9);

/// One process, all samples.
Outcome plain(const Program& program) {
  Net net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (program.is_sgd)
    optimizer = std::make_unique<torch::optim::SGD>(net.parameters(), kSgd);
  else if (program.has_groups)
    optimizer = std::make_unique<torch::optim::AdamW>(groups_of(net), kAdamW);
  else
    optimizer = std::make_unique<torch::optim::AdamW>(net.parameters(), kAdamW);
  torch::optim::StepLR scheduler(*optimizer, 2, 0.5);
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    for (int pass = 0; pass < program.passes; ++pass) net.loss(samples(step * program.passes + pass)).backward();
    if (step == 0)
      for (const auto& item : net.named_parameters()) outcome.gradients[item.key()] = item.value().grad().clone();
    outcome.norms.push_back(torch::nn::utils::clip_grad_norm_(net.parameters(), program.max_norm));
    optimizer->step();
    optimizer->zero_grad();
    scheduler.step();
  }
  outcome.weights = testing::parameters_of(net);
  return outcome;
}

Outcome sharded_by(const Program& program, Group& world) {
  Net net;
  FullySharded sharded(world, net, program.policy);
  FullySharded::Optimizer& optimizer = program.is_sgd       ? sharded.use<torch::optim::SGD>(kSgd)
                                       : program.has_groups ? sharded.use<torch::optim::AdamW>(groups_of(net), kAdamW)
                                                            : sharded.use<torch::optim::AdamW>(kAdamW);
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  Outcome outcome;
  const int64_t share = kSamples / world.size();
  for (int step = 0; step < kSteps; ++step) {
    for (int pass = 0; pass < program.passes; ++pass) {
      sharded.set_requires_gradient_sync(pass + 1 == program.passes);
      net.loss(samples(step * program.passes + pass).narrow(0, share * world.rank(), share)).backward();
    }
    if (step == 0)
      for (const auto& item : net.named_parameters()) outcome.gradients[item.key()] = sharded.full_grad(item.value());
    outcome.norms.push_back(sharded.clip_grad_norm_(program.max_norm));
    optimizer.step();
    optimizer.zero_grad();
    scheduler.step();
  }
  for (const auto& item : net.named_parameters()) outcome.weights[item.key()] = sharded.full_tensor(item.value());
  return outcome;
}

void expect_same(const Program& program, int ranks) {
  const Outcome expected = plain(program);
  const auto compare = [](const auto& found, const auto& wanted, const char* what) {
    for (const auto& [name, tensor] : wanted)
      EXPECT_LT((found.at(name) - tensor).norm().template item<double>(),
                kTolerance * tensor.norm().template item<double>())
          << what << " of " << name;
  };
  std::mutex mutex;
  run_ranks(ranks, [&](Rank& rank) {
    const Outcome found = sharded_by(program, rank.world());
    const std::lock_guard lock(mutex);
    for (int step = 0; step < kSteps; ++step)
      EXPECT_NEAR(found.norms[static_cast<size_t>(step)], expected.norms[static_cast<size_t>(step)], kTolerance);
    compare(found.gradients, expected.gradients, "gradient");
    compare(found.weights, expected.weights, "weight");
  });
}

TEST(FullyShard, TrainsAsOneProcess) {
  expect_same({}, 2);
  expect_same({.max_norm = 100}, 2);
  expect_same({.is_sgd = true}, 2);
  expect_same({.policy = {}}, 1);
}

TEST(FullyShard, GroupsHaveOptionsOfTheirOwn) { expect_same({.has_groups = true}, 2); }

TEST(FullyShard, BackwardPassesAddUp) { expect_same({.passes = 3}, 2); }

TEST(FullyShard, Policies) {
  expect_same({.policy = {.units = {"layers[.][0-9]+"}, .reshard_after_forward = false}}, 2);
  expect_same({.policy = {.shard_ranks = 2}}, 4);
  expect_same({.policy = {.cpu_offload = true}}, 2);
}

TEST(FullyShard, DroppedGradientsAreGone) {
  run_ranks(2, [](Rank& rank) {
    Net net, other;
    FullySharded sharded(rank.world(), net, {});
    FullySharded::Optimizer& optimizer = sharded.use<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
    net.loss(samples(1)).backward();
    optimizer.zero_grad();
    const at::Tensor loss = optimizer.step([&] {
      const at::Tensor loss = net.loss(samples(2));
      loss.backward();
      return loss;
    });
    torch::optim::SGD plain(other.parameters(), 0.1);
    other.loss(samples(2)).backward();
    plain.step();
    EXPECT_GT(loss.item<double>(), 0);
    const at::Tensor expected = other.norm->weight;
    EXPECT_TRUE(sharded.full_tensor(net.norm->weight).allclose(expected, 1e-6, 1e-6));
  });
}

TEST(FullyShard, RefusesByName) {
  const auto told_by = [](const std::function<void(FullySharded&, Net&)>& body, const FullyShardPolicy& policy = {}) {
    std::string told;
    run_ranks(2, [&](Rank& rank) {
      Net net;
      try {
        FullySharded sharded(rank.world(), net, policy);
        body(sharded, net);
      } catch (const Error& error) {
        if (rank.id() == 1) told = error.what();
      }
    });
    return told;
  };
  const auto expect_told = [](const std::string& told, const std::string& part) {
    EXPECT_NE(told.find(part), std::string::npos) << told;
  };
  const torch::optim::SGDOptions sgd(0.1);
  expect_told(told_by([](FullySharded&, Net&) {}, {.shard_ranks = 3}),
              "FullyShardPolicy::shard_ranks=3 does not divide the 2 ranks");
  expect_told(told_by([](FullySharded& sharded, Net&) { sharded.clip_grad_norm_(1); }), "clip_grad_norm_");
  expect_told(told_by([](FullySharded& sharded, Net&) {
                (void)sharded.use<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1));
              }),
              "LBFGS needs a closure");
  expect_told(told_by([&](FullySharded& sharded, Net&) {
                (void)sharded.use<torch::optim::SGD>(sgd);
                (void)sharded.use<torch::optim::SGD>(sgd);
              }),
              "use: this module has an optimizer");
  expect_told(told_by([&](FullySharded& sharded, Net& net) {
                std::vector<torch::optim::OptimizerParamGroup> groups;
                groups.emplace_back(std::vector<at::Tensor>{net.norm->weight});
                (void)sharded.use<torch::optim::SGD>(groups, sgd);
              }),
              "\"layers.0.weight\" is trained and in no group");
  expect_told(told_by([&](FullySharded& sharded, Net&) { sharded.use<torch::optim::SGD>(sgd).step(); }), "step");
}

}  // namespace
}  // namespace trireme
