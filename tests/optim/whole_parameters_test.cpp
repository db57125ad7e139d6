// Lamb and Muon, whose update of an element depends on its whole parameter, against their closed forms in fp64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "optim/lamb.h"
#include "optim/muon.h"
#include "tests/optim/agreement.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/optim/optimizer.h"

namespace trireme {
namespace {

using namespace testing;

constexpr double kClip = 0.5;  // exact

constexpr double kToleranceOfOneElement = kSteps * 0x1p-24;

const std::vector<std::vector<int64_t>> kWholeShapes = {{10, 13}, {7}, {33, 31}, {1}, {1000}, {5, 40}};

bool is_touched(int step, size_t parameter) { return !(parameter == 2 && step % 2 == 1); }

std::vector<at::Tensor> random_tensors(int seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  std::vector<at::Tensor> tensors;
  for (const auto& shape : kWholeShapes)
    tensors.push_back(at::randn(shape, generator).to(at::kBFloat16).to(at::kFloat));
  return tensors;
}

/// One step of one parameter, in fp64, as number `step`.
struct Reference {
  at::Tensor weights, first, second;
  int64_t step = 0;

  explicit Reference(const at::Tensor& start)
      : weights(start.to(at::kDouble)), first(at::zeros_like(weights)), second(at::zeros_like(weights)) {}

  void adam_moments(const at::Tensor& g, const OptimizerOptions& o) {
    ++step;
    first = first * o.beta1 + g * (1 - o.beta1);
    second = second * o.beta2 + g * g * (1 - o.beta2);
  }
  at::Tensor adam_direction(const OptimizerOptions& o) const {
    const double t = static_cast<double>(step);
    const double unbias1 = o.bias_correction ? 1 - std::pow(o.beta1, t) : 1;
    const double unbias2 = o.bias_correction ? 1 - std::pow(o.beta2, t) : 1;
    return first / unbias1 / ((second / unbias2).sqrt() + o.eps);
  }
  void lamb(const at::Tensor& g, const OptimizerOptions& o) {
    adam_moments(g, o);
    const at::Tensor update = adam_direction(o) + weights * o.weight_decay;
    const double ratio = weights.norm().item<double>() / update.norm().item<double>();
    weights = weights - update * (o.lr * std::min(o.max_coeff, std::max(o.min_coeff, ratio)));
  }
  void adamw(const at::Tensor& g, const OptimizerOptions& o, double lr) {
    adam_moments(g, o);
    weights = weights * (1 - lr * o.weight_decay) - adam_direction(o) * lr;
  }
  void muon(const at::Tensor& g, const OptimizerOptions& o) {
    first = first * o.momentum + g * (1 - o.momentum);
    at::Tensor x = g * (1 - o.momentum) + first * o.momentum;
    x = x / (x.norm() + 1e-7);
    for (int64_t i = 0; i < o.ns_steps; ++i) {
      const at::Tensor gram = x.mm(x.t());
      x = x * 3.4445 + (gram * -4.7750 + gram.mm(gram) * 2.0315).mm(x);
    }
    const double scale = std::sqrt(std::max(1.0, static_cast<double>(x.size(0)) / static_cast<double>(x.size(1))));
    weights = weights * (1 - o.lr * o.weight_decay) - x * (o.lr * scale);
  }
};

std::vector<at::Tensor> expected_weights(const OptimizerOptions& options) {
  std::vector<Reference> references;
  for (const at::Tensor& start : random_tensors(1)) references.emplace_back(start);
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<at::Tensor> gradients = random_tensors(100 + step);
    for (size_t i = 0; i < references.size(); ++i) {
      if (!is_touched(step, i)) continue;
      const at::Tensor g = gradients[i].to(at::kDouble) * kClip;
      if (options.kind == OptimizerKind::kLamb)
        references[i].lamb(g, options);
      else if (g.dim() == 2)
        references[i].muon(g, options);
      else
        references[i].adamw(g, options, *options.adam_lr);
    }
  }
  std::vector<at::Tensor> weights;
  for (const Reference& reference : references) weights.push_back(reference.weights);
  return weights;
}

/// Trains `parameters` on the gradients above, every rank on the same ones.
class Training {
 public:
  Training(Rank& rank, const OptimizerOptions& options, int stage, at::ScalarType dtype = at::kFloat) {
    std::vector<NamedParameter> named;
    const std::vector<at::Tensor> start = random_tensors(1);
    for (size_t i = 0; i < start.size(); ++i) {
      parameters.push_back(start[i].to(dtype, /*non_blocking=*/false, /*copy=*/true).requires_grad_());
      named.push_back({"p" + std::to_string(i), parameters.back()});
    }
    pager = std::make_unique<Pager>(rank.world(), named, PagerPolicy{.stage = stage});
    GroupedParameters grouped = group_parameters(options, {}, pager->parameters());
    groups = grouped.options;
    optimizer = std::make_unique<ShardedOptimizer>(*pager, rank.world(), std::move(grouped));
  }

  void step(int number) {
    const std::vector<at::Tensor> gradients = random_tensors(100 + number);
    at::Tensor loss = at::zeros({});
    for (size_t i = 0; i < parameters.size(); ++i)
      if (is_touched(number, i)) loss = loss + (parameters[i] * gradients[i].to(parameters[i].scalar_type())).sum();
    loss.backward();
    pager->end_backward();
    ClosedWindow window = pager->close_window();
    window.meet();
    optimizer->step(window, {.groups = groups, .gradient_factor = kClip});
    window.open();
  }

  std::vector<at::Tensor> parameters;
  std::unique_ptr<Pager> pager;
  std::vector<OptimizerOptions> groups;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

/// The comparison of each parameter, and of all of them together.
void expect_close(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  std::vector<at::Tensor> all_got, all_expected;
  for (size_t i = 0; i < expected.size(); ++i) {
    all_got.push_back(got[i].detach().reshape(-1));
    all_expected.push_back(expected[i].reshape(-1));
    const double tolerance = expected[i].numel() == 1 ? kToleranceOfOneElement : kTolerance;
    EXPECT_LE(relative_difference(all_got[i], all_expected[i]), tolerance) << "parameter " << i;
  }
  EXPECT_LE(relative_difference(at::cat(all_got), at::cat(all_expected)), kTolerance);
}

const OptimizerOptions kLamb{
    .kind = OptimizerKind::kLamb, .lr = 3e-3, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1};
const OptimizerOptions kMuon{.kind = OptimizerKind::kMuon,
                             .lr = 3e-3,
                             .beta2 = 0.95,
                             .eps = 1e-10,
                             .weight_decay = 0.1,
                             .momentum = 0.95,
                             .adam_lr = 1e-3};

void expect_closed_form(const OptimizerOptions& options) {
  const std::vector<at::Tensor> expected = expected_weights(options);
  for (const int world : {1, 2, 4})
    for (int stage = 0; stage <= 3; ++stage)
      run_ranks(world, [&](Rank& rank) {
        Training training(rank, options, stage);
        for (int step = 0; step < kSteps; ++step) training.step(step);
        training.pager->restore();
        SCOPED_TRACE(str("world ", world, ", stage ", stage));
        expect_close(training.parameters, expected);
      });
}

TEST(Lamb, AgreesWithItsClosedFormAtAnyNumberOfRanksAndStage) { expect_closed_form(kLamb); }

TEST(Lamb, WithoutBiasCorrectionToo) {
  OptimizerOptions options = kLamb;
  options.bias_correction = false;
  const std::vector<at::Tensor> expected = expected_weights(options);
  run_ranks(1, [&](Rank& rank) {
    Training training(rank, options, 0);
    for (int step = 0; step < kSteps; ++step) training.step(step);
    expect_close(training.parameters, expected);
  });
}

TEST(Lamb, BoundsTheTrustRatio) {
  const OptimizerOptions options{.min_coeff = 0.5, .max_coeff = 4};
  EXPECT_DOUBLE_EQ(lamb_trust({.weights = 9, .update = 4}, options), 1.5);
  EXPECT_DOUBLE_EQ(lamb_trust({.weights = 100, .update = 1}, options), 4);
  EXPECT_DOUBLE_EQ(lamb_trust({.weights = 1, .update = 100}, options), 0.5);
  EXPECT_DOUBLE_EQ(lamb_trust({.weights = 0, .update = 1}, options), 1);
  EXPECT_DOUBLE_EQ(lamb_trust({.weights = 1, .update = 0}, options), 1);
}

TEST(Muon, AgreesWithItsClosedFormAtAnyNumberOfRanksAndStage) { expect_closed_form(kMuon); }

std::vector<at::Tensor> trained(const OptimizerOptions& options, int world, int stage) {
  std::vector<at::Tensor> result;
  run_ranks(world, [&](Rank& rank) {
    Training training(rank, options, stage);
    for (int step = 0; step < 5; ++step) training.step(step);
    training.pager->restore();
    if (rank.id() == 0)
      for (const at::Tensor& parameter : training.parameters) result.push_back(parameter.detach().clone());
  });
  return result;
}

TEST(Muon, GivesTheSameBitsAtAnyNumberOfRanksAndStage) {
  const std::vector<at::Tensor> alone = trained(kMuon, 1, 0);
  for (const int world : {2, 4})
    for (int stage = 0; stage <= 3; ++stage) {
      const std::vector<at::Tensor> together = trained(kMuon, world, stage);
      for (size_t i = 0; i < alone.size(); ++i)
        EXPECT_TRUE(at::equal(together[i], alone[i])) << "world " << world << ", stage " << stage << ", " << i;
    }
}

TEST(WholeParameters, AreRoundedToBf16FromTheirMasters) {
  for (const OptimizerOptions& options : {kLamb, kMuon}) {
    const std::vector<at::Tensor> expected = expected_weights(options);
    run_ranks(1, [&](Rank& rank) {
      Training training(rank, options, 0, at::kBFloat16);
      for (int step = 0; step < kSteps; ++step) training.step(step);
      std::vector<at::Tensor> masters(expected.size());
      for (const TensorSlice& slice : training.optimizer->state())
        if (slice.name.rfind("master.p", 0) == 0) masters[std::stoul(slice.name.substr(8))] = slice.data;
      expect_close(masters, expected);
      for (size_t i = 0; i < masters.size(); ++i)
        EXPECT_TRUE(at::equal(training.parameters[i].detach().reshape(-1), masters[i].to(at::kBFloat16)));
    });
  }
}

TEST(WholeParameters, KeepTheStatesThatTheirOptimizerHas) {
  run_ranks(1, [&](Rank& rank) {
    Training training(rank, kMuon, 0);
    std::vector<std::string> names;
    for (const TensorSlice& slice : training.optimizer->state()) names.push_back(slice.name);
    const auto has = [&](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
    EXPECT_TRUE(has("optimizer.momentum_buffer.p0"));
    EXPECT_FALSE(has("optimizer.exp_avg_sq.p0"));
    EXPECT_TRUE(has("optimizer.exp_avg.p1"));
    EXPECT_TRUE(has("optimizer.exp_avg_sq.p1"));
    // p0, p2, p5 padded to 160, 1024, 224 elements have one state, p1, p3, p4 padded to 32, 32, 1024 two.
    EXPECT_EQ(training.optimizer->state_bytes(), 4 * (1408 + 2 * 1088));
  });
}

TEST(Orthogonalise, BringsSingularValuesNearOneAndKeepsTheSingularVectors) {
  const at::Tensor diagonal = at::diag(at::tensor({1.0f, 0.5f, 0.125f}));
  for (const at::Tensor& matrix :
       {diagonal, at::cat({diagonal, at::zeros({2, 3})}), at::cat({diagonal, at::zeros({3, 2})}, 1)}) {
    const at::Tensor result = orthogonalise(matrix, 5);
    ASSERT_EQ(result.sizes(), matrix.sizes());
    for (int64_t row = 0; row < result.size(0); ++row)
      for (int64_t column = 0; column < result.size(1); ++column)
        EXPECT_NEAR(result[row][column].item<float>(), row == column ? 1 : 0, row == column ? 0.35 : 1e-6);
  }
}

TEST(ShareMatrices, GivesTheDearestFirstToTheLeastBusyRank) {
  const std::vector<PlacedMatrix> matrices = {
      {.shape = {2, 2}}, {.shape = {8, 8}}, {.shape = {2, 2}}, {.shape = {7, 7}}};
  EXPECT_EQ(share_matrices(matrices, 2), (std::vector<int>{1, 0, 1, 1}));
  EXPECT_EQ(share_matrices(matrices, 1), (std::vector<int>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace trireme
