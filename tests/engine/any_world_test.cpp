// A checkpoint of any world size and stage, loaded at any other.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/captured_log.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/source.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using testing::TemporaryFolder;

/// Worlds of 1, 2, 3, 4, 8 share these micro-batches evenly.
constexpr int kMicroBatchesPerStep = 24;

enum class Weights { kFp32, kBf16, kFp16 };

struct Layout {
  int world = 1;
  int stage = 0;
};

struct Change {
  Layout from, to;
  Weights weights = Weights::kFp32;
  GatherPolicy gather = GatherPolicy::kAuto;
};

std::string name_of(const Layout& layout) { return str("World", layout.world, "Stage", layout.stage); }

std::string name_of(Weights weights) {
  return weights == Weights::kFp32 ? "Fp32" : weights == Weights::kBf16 ? "Bf16" : "Fp16";
}

std::string name_of(const Change& change) {
  return str(name_of(change.from), "To", name_of(change.to), name_of(change.weights));
}

/// Every pair of worlds, with stages that go through all pairs, in every dtype.
std::vector<Change> all_changes() {
  std::vector<Change> changes;
  int pair = 0;
  for (const Weights weights : {Weights::kFp32, Weights::kBf16, Weights::kFp16})
    for (const int from : {1, 2, 3, 4, 8})
      for (const int to : {1, 2, 3, 4, 8}) {
        // 5 is no divisor of 16: consecutive pairs differ in both stages, and 16 of them are all.
        const int stages = pair++ * 5 % 16;
        changes.push_back({.from = {from, stages / 4},
                           .to = {to, stages % 4},
                           .weights = weights,
                           .gather = pair % 2 == 0 ? GatherPolicy::kCopy : GatherPolicy::kShared});
      }
  return changes;
}

/// Adam with groups, a schedule and clipping: whatever has a state.
Config config_of(const Change& change, const Layout& layout) {
  Config config = default_config(layout.world);
  config.batch = {.train_batch_size = kMicroBatchesPerStep,
                  .train_micro_batch_size_per_gpu = 1,
                  .gradient_accumulation_steps = kMicroBatchesPerStep / layout.world};
  config.optimizer = OptimizerOptions{.lr = 0.01, .weight_decay = 0.1};
  config.scheduler = LrScheduleOptions{.kind = LrScheduleKind::kWarmup, .warmup_num_steps = 20};
  config.gradient_clipping = 0.5;
  config.pager.stage = layout.stage;
  config.pager.gather = change.gather;
  config.pager.poison = change.gather == GatherPolicy::kCopy;
  if (change.weights == Weights::kBf16) config.precision.weight_dtype = at::kBFloat16;
  if (change.weights == Weights::kFp16) {
    config.precision.weight_dtype = at::kHalf;
    config.precision.loss_scale.initial_scale_power = 7;  // small enough that no step is skipped
  }
  return config;
}

/// The tied net: tied, frozen, unused and rarely used parameters; biases are a group without decay.
class Training {
 public:
  Training(Rank& rank, const Change& change, const Layout& layout)
      : rank_(rank),
        model_(testing::make_tied_net()),
        engine_(rank.world(), *model_.module,
                {.config = config_of(change, layout),
                 .parameter_groups = {{.patterns = {"bias$"}, .lr = 0.02, .weight_decay = 0}}}) {
    at::set_num_threads(1);
  }

  Engine& engine() { return engine_; }

  /// One step over the job's micro-batches; their mean loss, in order of their numbers on every rank.
  double step() {
    const at::Tensor losses = at::zeros({kMicroBatchesPerStep}, at::kDouble);
    const int64_t first = engine_.global_steps() * kMicroBatchesPerStep;
    for (int64_t round = 0; round < engine_.gradient_accumulation_steps(); ++round) {
      const int64_t number = round * rank_.size() + rank_.id();
      // The same branches for the same micro-batch at any world size.
      const at::Tensor loss = model_.loss({first + number, first + number});
      losses[number] = loss.item<double>();
      engine_.backward(loss);
      engine_.step();
    }
    rank_.world().all_reduce(losses).wait();
    return losses.mean().item<double>();
  }

 private:
  Rank& rank_;
  testing::TrainedModel model_;
  Engine engine_;
};

/// Every tensor of a checkpoint, reassembled.
std::map<std::string, at::Tensor> tensors_of(const std::filesystem::path& checkpoint) {
  const CheckpointSource source = open_checkpoint(checkpoint);
  TensorReader reader(source);
  std::map<std::string, at::Tensor> tensors;
  for (size_t i = 0; i < source.manifest.tensors.size(); ++i) {
    const SavedTensor& saved = source.manifest.tensors[i];
    const at::Tensor tensor = at::empty(saved.shape, saved.dtype);
    reader.read(i, 0, tensor.numel(), static_cast<std::byte*>(tensor.data_ptr()));
    tensors.emplace(saved.name, tensor);
  }
  return tensors;
}

void expect_survives(const Change& change) {
  SCOPED_TRACE(name_of(change));
  const CapturedLog quiet;
  const TemporaryFolder folder;
  double expected = 0, found = 0;
  run_ranks(change.from.world, [&](Rank& rank) {
    Training training(rank, change, change.from);
    for (int i = 0; i < 3; ++i) training.step();
    training.engine().save_checkpoint(folder.path(), {.tag = "saved"});
    training.step();
    const double loss = training.step();
    if (rank.id() == 0) expected = loss;
  });
  run_ranks(change.to.world, [&](Rank& rank) {
    Training training(rank, change, change.to);
    training.step();  // what stands there is overwritten
    ASSERT_TRUE(training.engine().load_checkpoint(folder.path()));
    EXPECT_EQ(training.engine().global_steps(), 3);
    training.engine().save_checkpoint(folder.path(), {.tag = "again"});
    training.step();
    const double loss = training.step();
    if (rank.id() == 0) found = loss;
  });

  const auto saved = tensors_of(folder.path() / "saved");
  const auto again = tensors_of(folder.path() / "again");
  ASSERT_EQ(saved.size(), again.size());
  for (const auto& [name, tensor] : saved) {
    ASSERT_TRUE(again.contains(name)) << name;
    EXPECT_TRUE(at::equal(tensor, again.at(name))) << name;
  }
  // Sums over other numbers of ranks round differently; in 16 bit a weight may round to its neighbour.
  EXPECT_NEAR(found, expected, expected * (change.weights == Weights::kFp32 ? 1e-6 : 1e-2));
}

// One test per dtype: a process of its own for each of the 75 changes would take longer than the changes.
class AnyWorld : public ::testing::TestWithParam<Weights> {};

TEST_P(AnyWorld, LoadsTheSameBitsAndTakesTheSameNextStep) {
  int changes = 0;
  for (const Change& change : all_changes()) {
    if (change.weights != GetParam()) continue;
    expect_survives(change);
    ++changes;
  }
  EXPECT_EQ(changes, 25);
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, AnyWorld, ::testing::Values(Weights::kFp32, Weights::kBf16, Weights::kFp16),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace trireme
