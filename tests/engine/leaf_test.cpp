// A mixture of experts whose ranks pick different ones: what works without a word, what is refused by name, and leaves.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <functional>

#include "tests/engine/dot.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/engine.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int kExperts = 4;
constexpr int64_t kWidth = 8;

struct MixtureImpl : torch::nn::Module {
  MixtureImpl() {
    router = register_module("router", torch::nn::Linear(kWidth, kExperts));
    for (int i = 0; i < kExperts; ++i) experts->push_back(torch::nn::Linear(kWidth, kWidth));
    register_module("experts", experts);
  }
  at::Tensor forward(const at::Tensor& x, int64_t chosen) {
    const at::Tensor weight = torch::softmax(router->forward(x), -1).select(-1, chosen).unsqueeze(-1);
    auto* expert = experts[chosen]->as<torch::nn::LinearImpl>();
    // Odd ones leave their bias alone, and with it its unit.
    return weight * (chosen % 2 == 0 ? expert->forward(x) : torch::matmul(x, expert->weight.t()));
  }
  torch::nn::Linear router{nullptr};
  torch::nn::ModuleList experts;
};
TORCH_MODULE(Mixture);

struct SparseNetImpl : torch::nn::Module {
  SparseNetImpl() {
    in = register_module("in", torch::nn::Linear(kWidth, kWidth));
    mixture = register_module("mixture", Mixture());
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    draw_weights(*this);
    // Frozen parameters are units of their own, so an expert is two.
    for (int i = 0; i < kExperts; ++i) mixture->experts[i]->as<torch::nn::LinearImpl>()->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x, int64_t chosen) {
    return out->forward(torch::tanh(mixture->forward(torch::tanh(in->forward(x)), chosen)));
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
  Mixture mixture{nullptr};
};
TORCH_MODULE(SparseNet);

Config sparse_config(int stage, GatherPolicy gather) {
  Config config = sgd_config(2);
  config.pager.stage = stage;
  config.pager.gather = gather;
  config.pager.poison = true;
  config.pager.live_bytes = 0;
  config.pager.units.merge_below_bytes = 0;
  return config;
}

/// Trains on two ranks that always pick different experts, and returns what rank 0 has learnt.
std::vector<Floats> train(const Config& config) {
  std::vector<Floats> learnt;
  run_ranks(2,
            [&](Rank& rank) {
              at::set_num_threads(1);
              SparseNet net;
              Engine engine(rank.world(), *net, {.config = config});
              for (int64_t step = 0; step < 6; ++step) {
                const at::Tensor input = input_of(*net, {2 * step + rank.id(), step}, {3, kWidth});
                engine.backward(net->forward(input, (2 * step + rank.id()) % kExperts).square().mean());
                engine.step();
              }
              engine.destroy();
              if (rank.id() != 0) return;
              for (const at::Tensor& parameter : net->parameters()) learnt.push_back(values(parameter));
            },
            {.timeout = std::chrono::seconds(5)});
  return learnt;
}

TEST(ExpertsThatDifferByRank, TrainAtEveryStageWithoutAnyMarkUnderShared) {
  const std::vector<Floats> expected = train(sparse_config(0, GatherPolicy::kAuto));
  for (const int stage : {1, 2, 3}) EXPECT_EQ(train(sparse_config(stage, GatherPolicy::kAuto)), expected) << stage;
}

TEST(ExpertsThatDifferByRank, AreRefusedByRankAndUnitUnderCopy) {
  const std::string text = error_of<CommError>([] { train(sparse_config(3, GatherPolicy::kCopy)); });
  EXPECT_SAYS(text, "rank 0 called all_gather");
  EXPECT_SAYS(text, "rank 1 called all_gather");
  EXPECT_SAYS(text, "of mixture.experts.0");
  EXPECT_SAYS(text, "of mixture.experts.1");
  EXPECT_SAYS(text, "zero_optimization.leaf_module");
}

TEST(ExpertsThatDifferByRank, TrainUnderCopyAsALeaf) {
  const std::vector<Floats> expected = train(sparse_config(0, GatherPolicy::kAuto));
  const auto by = [&](const std::function<void(LeafModuleOptions&)>& choose) {
    Config config = sparse_config(3, GatherPolicy::kCopy);
    choose(config.leaf_modules);
    return train(config);
  };
  EXPECT_EQ(by([](LeafModuleOptions& leaves) { leaves.names = {"mixture.experts"}; }), expected);
  EXPECT_EQ(by([](LeafModuleOptions& leaves) { leaves.name_suffixes = {"ture"}; }), expected);
  EXPECT_EQ(by([](LeafModuleOptions& leaves) { leaves.classes = {"my_package.Mixture"}; }), expected);
  // The model itself.
  EXPECT_EQ(by([](LeafModuleOptions& leaves) { leaves.names = {""}; }), expected);
  EXPECT_EQ(by([](LeafModuleOptions& leaves) { leaves.classes = {"SparseNet"}; }), expected);
}

TEST(LeafModules, ThatTheModelLacksAreNamed) {
  Config config = sparse_config(3, GatherPolicy::kCopy);
  config.leaf_modules.names = {"mixture.expert"};
  const std::string text = error_of<ConfigError>([&] { train(config); });
  EXPECT_SAYS(text, "zero_optimization.leaf_module.names: no module is called \"mixture.expert\"; the model has: in, ");
  config.leaf_modules = {.classes = {}, .names = {}, .name_suffixes = {"gate"}};
  EXPECT_SAYS(error_of<ConfigError>([&] { train(config); }), "zero_optimization.leaf_module.name_suffixes");
}

}  // namespace
}  // namespace trireme
