#include "trireme/pager/pager.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>

#include "tests/pager/training.h"

namespace trireme {
namespace {

using testing::kZeroStages;
using testing::named_parameters_of;
using testing::sgd_step;
using testing::ZeroStage;

class EverySharding : public ::testing::TestWithParam<ZeroStage> {};
INSTANTIATE_TEST_SUITE_P(Pager, EverySharding, ::testing::ValuesIn(kZeroStages),
                         [](const auto& info) { return info.param.name; });

torch::nn::Sequential make_mlp() {
  return torch::nn::Sequential(torch::nn::Linear(7, 33), torch::nn::Tanh(), torch::nn::Linear(33, 130),
                               torch::nn::Tanh(), torch::nn::Linear(130, 5));
}

// Three SGD steps of one plain process on the mean of the ranks' losses.
std::vector<at::Tensor> plain_weights(int ranks) {
  manual_seed(3);
  auto net = make_mlp();
  for (int step = 0; step < 3; ++step) {
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < ranks; ++rank) {
      manual_seed(100 * step + rank);
      net->zero_grad();
      net->forward(at::randn({4, 7})).square().mean().backward();
      const auto parameters = net->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (rank == 0)
          sums.push_back(parameters[i].grad().clone());
        else
          sums[i] += parameters[i].grad();
      }
    }
    at::NoGradGuard no_grad;
    const auto parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].sub_((sums[i] * float(1.0 / ranks)).mul(0.1));
  }
  std::vector<at::Tensor> weights;
  for (const at::Tensor& parameter : net->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

TEST_P(EverySharding, TrainsLikeOneProcess) {
  at::set_num_threads(1);
  for (const int ranks : {1, 2, 3, 4}) {
    std::vector<at::Tensor> expected;
    run_ranks(1, [&](Rank&) { expected = plain_weights(ranks); });
    run_ranks(ranks, [&](Rank& rank) {
      manual_seed(3);
      auto net = make_mlp();
      Pager pager(rank.world(), named_parameters_of(*net), GetParam().policy);
      for (int step = 0; step < 3; ++step) {
        manual_seed(100 * step + rank.id());
        net->forward(at::randn({4, 7})).square().mean().backward();
        pager.end_backward();
        sgd_step(pager, 0.1);
      }
      pager.restore();
      const auto parameters = net->parameters();
      for (size_t i = 0; i < parameters.size(); ++i)
        EXPECT_TRUE(at::equal(parameters[i], expected[i]))
            << "parameter " << i << " of rank " << rank.id() << " of " << ranks;
    });
  }
}

}  // namespace
}  // namespace trireme
