// Layers that are cut over ranks: slices, steps and norms against one process.
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/run_ranks.h"
#include "tests/training/slices.h"
#include "trireme/base/error.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/pager/init/init.h"
#include "trireme/training/training.h"

namespace trireme::slices {
namespace {

struct Result {
  std::vector<Tensors> weights;            ///< after training, by rank
  std::vector<Tensors> first;              ///< before it
  std::vector<std::vector<double>> norms;  ///< by rank
  std::vector<double> buffers;             ///< by rank
  PartitionPlan plan;
};

/// Rank 0's values count, but ranks that construct together have the same ones.
std::shared_ptr<Part> make_module(const TrainingRun& run, Rank& rank) {
  if (!run.is_under_init) return make_llama_part(7 + rank.id());
  const zero::Init scope(rank.world(), {.smallest_bytes = 0, .live_bytes = 0});
  return make_llama_part(7);
}

/// Samples are the same whatever the run: those of all data-parallel ranks and micro-batches of a step.
Result train(const TrainingRun& run, int samples_per_step) {
  Result result;
  result.weights.resize(run.world());
  result.first.resize(run.world());
  result.norms.resize(run.world());
  result.buffers.resize(run.world());
  const int per_pass = samples_per_step / (run.data * run.accumulation);
  run_ranks(run.world(), [&](Rank& rank) {
    at::set_num_threads(1);
    const auto module = make_module(run, rank);
    std::unique_ptr<Group> group;
    if (run.is_on_device) {
      move_to_fake(*module, fake_device(rank.id()));
      if (run.world() > 1) group = make_fake_nccl_group(rank.world(), fake_device(rank.id()));
    }
    Training training(group ? *group : rank.world(), *module, options_of(run));
    result.first[rank.id()] = weights_of(training);
    const int place = rank.id() / run.tensor;
    for (int step = 0; step < kSteps; ++step) {
      for (int pass = 0; pass < run.accumulation; ++pass) {
        std::vector<int64_t> samples;
        for (int i = 0; i < per_pass; ++i)
          samples.push_back(step * samples_per_step + (place * run.accumulation + pass) * per_pass + i);
        backward(training, samples);
        const bool ends = training.step().step().ended_window;
        EXPECT_EQ(ends, pass + 1 == run.accumulation);
      }
      result.norms[rank.id()].push_back(training.step().outcome().norm.value_or(-1));
    }
    if (rank.id() == 0 && training.partition() != nullptr) result.plan = *training.partition();
    EXPECT_EQ(training.partition() != nullptr, run.tensor > 1);
    EXPECT_EQ(training.groups().slices != nullptr, run.tensor > 1);
    training.destroy();
    for (const auto& item : module->named_parameters())
      result.weights[rank.id()][item.key()] = item.value().detach().cpu();
    result.buffers[rank.id()] = module->named_buffers()["table"][0].item<double>();
  });
  return result;
}

void expect_slices(const TrainingRun& run, const Tensors& whole, const std::vector<Tensors>& got,
                   const PartitionPlan& plan) {
  size_t cut_ones = 0;
  for (int rank = 0; rank < run.world(); ++rank)
    for (const PartitionedParameter& parameter : plan.parameters) {
      const TensorPart& part = parameter.parts[rank % run.tensor];
      cut_ones += part.dim >= 0;
      const at::Tensor expected = cut(whole.at(parameter.name), part), found = got[rank].at(parameter.name);
      ASSERT_EQ(found.sizes(), expected.sizes()) << parameter.name;
      EXPECT_TRUE(at::equal(found, expected)) << parameter.name << ", rank " << rank;
    }
  EXPECT_EQ(cut_ones, run.world() * 17);  // all but the norms
}

/// The ranks' weights after destroy(): whole and the same.
void expect_wholes(const Tensors& whole, const std::vector<Tensors>& got, double tolerance) {
  for (const auto& [name, expected] : whole)
    for (size_t rank = 0; rank < got.size(); ++rank) {
      const at::Tensor found = got[rank].at(name);
      ASSERT_EQ(found.sizes(), expected.sizes()) << name;
      EXPECT_TRUE(at::allclose(found, expected, tolerance, tolerance)) << name << ", rank " << rank;
      EXPECT_TRUE(at::equal(found, got[0].at(name))) << name << ", rank " << rank;
    }
}

/// `run` against one process, at clipping that bites and without.
void expect_as_one_process(TrainingRun run, double tolerance) {
  const int samples = run.data * run.accumulation;
  for (const double clipping : {0.0, 0.5}) {
    run.clipping = clipping;
    // Adam looks at no gradient's scale.
    if (clipping > 0) run.optimizer = {.kind = OptimizerKind::kSgd, .lr = 1, .momentum = 0.5};
    const Result alone =
        train({.stage = kZeroStages[0], .clipping = clipping, .dtype = run.dtype, .optimizer = run.optimizer}, samples);
    const Result got = train(run, samples);
    expect_slices(run, alone.first[0], got.first, got.plan);
    expect_wholes(alone.weights[0], got.weights, tolerance);
    for (int rank = 0; rank < run.world(); ++rank) {
      EXPECT_EQ(got.buffers[rank], 7) << rank;
      for (int step = 0; step < kSteps; ++step) {
        EXPECT_GT(got.norms[rank][step], 1);
        EXPECT_NEAR(got.norms[rank][step], alone.norms[0][step], 1e-4 * alone.norms[0][step]) << "step " << step;
        EXPECT_EQ(got.norms[rank][step], got.norms[0][step]);
      }
    }
  }
}

class SlicesAt : public ::testing::TestWithParam<ZeroStage> {};

TEST_P(SlicesAt, TrainLikeOneProcess) {
  for (const auto& [tensor, data] : {std::pair{2, 1}, {2, 2}, {4, 1}})
    expect_as_one_process({.tensor = tensor, .data = data, .stage = GetParam()}, 2e-5);
}

TEST_P(SlicesAt, AccumulateLikeOneProcess) {
  expect_as_one_process({.tensor = 2, .data = 2, .stage = GetParam(), .accumulation = 2}, 2e-5);
}

TEST_P(SlicesAt, In16BitsTrainLikeOneProcess) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    expect_as_one_process({.tensor = 2, .data = 1, .stage = GetParam(), .dtype = dtype}, 2e-2);
}

TEST_P(SlicesAt, AreDeterministicToo) {
  if (GetParam().policy.stage == 0) return;
  expect_as_one_process({.tensor = 2, .data = 2, .stage = GetParam(), .is_deterministic = true}, 2e-5);
}

TEST_P(SlicesAt, OfWhatInitHasShardedTrainLikeOneProcess) {
  for (const auto& [tensor, data] : {std::pair{2, 1}, {2, 2}, {4, 1}})
    expect_as_one_process({.tensor = tensor, .data = data, .stage = GetParam(), .is_under_init = true}, 2e-5);
}

TEST_P(SlicesAt, OfWhatInitHasShardedAreCastToo) {
  TrainingRun run{.tensor = 2, .data = 2, .stage = GetParam(), .dtype = at::kBFloat16, .is_under_init = true};
  const Result got = train(run, 2), alone = train({.stage = kZeroStages[0], .dtype = at::kBFloat16}, 2);
  expect_slices(run, alone.first[0], got.first, got.plan);
}

INSTANTIATE_TEST_SUITE_P(Tensor, SlicesAt, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

// Units hold what is counted and what is not; of offloaded ones the norm is measured as they leave.
TEST(Slices, OfADeviceTrainLikeOneProcess) {
  for (const int stage : {0, 2, 4})
    for (const double offload_ratio : {0.0, 1.0}) {
      if (stage == 0 && offload_ratio > 0) continue;
      expect_as_one_process(
          {.tensor = 2, .data = 2, .stage = kZeroStages[stage], .is_on_device = true, .offload_ratio = offload_ratio},
          2e-5);
    }
}

// Dropout of what all ranks of a layer compute alike must drop the same elements.
TEST(Slices, DrawTheSameNumbersForTheSameSamples) {
  std::vector<at::Tensor> drawn(4);
  run_ranks(4, [&](Rank& rank) {
    manual_seed(rank.id());
    const auto module = make_llama_part(3);
    Training training(rank.world(), *module,
                      options_of({.tensor = 2, .data = 2, .stage = kZeroStages[2], .is_deterministic = true}));
    training.step().start_micro_batch(0);
    drawn[rank.id()] = at::rand({4});
    training.destroy();
  });
  EXPECT_TRUE(at::equal(drawn[0], drawn[1]));
  EXPECT_TRUE(at::equal(drawn[2], drawn[3]));
  EXPECT_FALSE(at::equal(drawn[0], drawn[2]));
}

// The squares of all gradients of the model, each once, by a plain sum.
TEST(Slices, CountEachGradientOnce) {
  const Result got = train({.tensor = 4, .stage = kZeroStages[2]}, 1);
  double squares = 0;
  for (const auto& [name, shape] : llama_shapes())
    if (name != "model.norm.weight") squares += gradient_of(name, shape, 0).square().sum().item<double>();
  EXPECT_NEAR(got.norms[3][0], std::sqrt(squares), 1e-4);
}

/// The refusal of each of `ranks`: the same everywhere, and no parameter has changed.
void expect_refused(int ranks, const Shapes& shapes, const std::function<void(TrainingOptions&, int rank)>& change,
                    const std::string& text) {
  run_ranks(ranks, [&](Rank& rank) {
    const auto module = make_part(shapes, 3);
    const Tensors before = parameters_of(*module);
    TrainingOptions options = options_of({.tensor = ranks, .stage = kZeroStages[1]});
    change(options, rank.id());
    const auto make = [&] { Training(rank.world(), *module, options); };
    EXPECT_SAYS(error_of<ConfigError>(make), text);
    for (const auto& [name, value] : parameters_of(*module)) EXPECT_TRUE(at::equal(value, before.at(name))) << name;
  });
}

TEST(SlicesAreRefused, WithOptimizersOfWholeParameters) {
  for (const OptimizerKind kind : {OptimizerKind::kLamb, OptimizerKind::kMuon})
    expect_refused(
        2, llama_shapes(),
        [&](TrainingOptions& options, int) {
          std::get<Config>(options.config).optimizer = OptimizerOptions{.kind = kind};
        },
        "looks at whole parameters, and with tensor_parallel (autotp_size=2) a rank has slices");
  run_ranks(2, [](Rank& rank) {
    const auto module = make_part(llama_shapes(), 3);
    TrainingOptions options = options_of({.tensor = 2, .stage = kZeroStages[1]});
    std::get<Config>(options.config).optimizer.reset();
    Training training(rank.world(), *module, options);
    EXPECT_SAYS(error_of<ConfigError>(
                    [&] { training.set_optimizer({.optimizer = OptimizerOptions{.kind = OptimizerKind::kLamb}}); }),
                "optimizer Lamb looks at whole parameters");
    training.set_optimizer({.optimizer = OptimizerOptions{}});
    training.destroy();
  });
}

TEST(SlicesAreRefused, WhereRanksKnowOtherThings) {
  expect_refused(
      2, llama_shapes(),
      [](TrainingOptions& options, int rank) {
        if (rank == 1) options.tp_plan = {{"model.layers.*.mlp.up_proj", "colwise"}};
      },
      "would cut the model differently");
  expect_refused(
      2, llama_shapes(),
      [](TrainingOptions& options, int rank) {
        if (rank == 1) options.tp_plan = {{"model.layers.*.mlp.up_proj", "no style"}};
      },
      "no style");
}

TEST(SlicesAreRefused, WithADegreeThatIsNotTheRanks) {
  expect_refused(
      2, llama_shapes(), [](TrainingOptions& options, int) { std::get<Config>(options.config).tensor.autotp_size = 4; },
      "`tensor_parallel.autotp_size` = 4, and the program's tensor degree is 2; remove the key, or set it to that");
}

}  // namespace
}  // namespace trireme::slices
