// Loads that end half-way, and saves that go on while an engine trains.
#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/captured_log.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

/// An engine over the tied net, which has whatever a model can have, and its micro-batches.
class Trainee {
 public:
  Trainee(Rank& rank, Config config)
      : rank_(rank), model_(make_tied_net()), engine_(rank.world(), *model_.module, {.config = std::move(config)}) {
    at::set_num_threads(1);
  }
  Engine& operator*() { return engine_; }
  Engine* operator->() { return &engine_; }

  void step() {
    const int64_t round = engine_.micro_steps();
    engine_.backward(model_.loss({round * rank_.size() + rank_.id(), round}));
    engine_.step();
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step();
  }

  /// Ends the engine.
  std::vector<at::Tensor> weights() {
    engine_.destroy();
    std::vector<at::Tensor> weights;
    for (const at::Tensor& parameter : model_.module->parameters()) weights.push_back(parameter.detach().clone());
    return weights;
  }

 private:
  Rank& rank_;
  TrainedModel model_;
  Engine engine_;
};

void expect_same(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << "parameter " << i;
}

Config adam_config(const Stage& stage) {
  Config config = with_stage(sgd_config(2), stage);
  config.optimizer = OptimizerOptions{.lr = 0.01, .weight_decay = 0.1};
  return config;
}

/// Changes the last byte of a file: some tensor's data.
void damage(const std::filesystem::path& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-1, std::ios::end);
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(-1, std::ios::end);
  file.put(byte);
}

class EngineCheckpoint : public ::testing::TestWithParam<Stage> {};

TEST_P(EngineCheckpoint, WhoseLoadEndsHalfWayStopsTrainingUntilAGoodOne) {
  const CapturedLog quiet;
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Trainee straight(rank, adam_config(GetParam()));
    straight.steps(2);
    straight->save_checkpoint(folder.path(), {.tag = "good"});
    straight->save_checkpoint(folder.path(), {.tag = "bad"});
    straight.steps(2);

    if (rank.id() == 0) damage(folder.path() / "bad/shard-00001-of-00002.safetensors");
    rank.world().barrier();
    Trainee other(rank, adam_config(GetParam()));
    other.step();
    try {
      other->load_checkpoint(folder.path(), {.tag = "bad"});
      ADD_FAILURE() << "the load did not throw";
    } catch (const CheckpointError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTornLoad) << error.what();
      EXPECT_SAYS(std::string(error.what()), "shard-00001-of-00002.safetensors");
    }
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { other->backward(at::ones({}).requires_grad_()); }, [&] { other->step(); },
             [&] { other->save_checkpoint(folder.path(), {.tag = "mixture"}); },
             [&] { other->save_16bit_model(folder.path()); }})
      EXPECT_SAYS(error_of<StateError>(use), "a mixture; load an intact checkpoint first. It ended with");

    ASSERT_TRUE(other->load_checkpoint(folder.path(), {.tag = "good"}));
    other.steps(2);
    expect_same(other.weights(), straight.weights());
  });
}

TEST_P(EngineCheckpoint, ThatIsVerifiedFirstLeavesTrainingUnharmed) {
  const CapturedLog quiet;
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Config config = adam_config(GetParam());
    config.checkpoint.verify = Verify::kFirst;
    Trainee saved(rank, config);
    saved.step();
    saved->save_checkpoint(folder.path());
    if (rank.id() == 0) damage(folder.path() / "global_step1/shard-00001-of-00002.safetensors");
    rank.world().barrier();
    Trainee straight(rank, config), other(rank, config);
    for (Trainee* trainee : {&straight, &other}) {
      trainee->steps(2);
      if (trainee == &other) {
        EXPECT_SAYS(error_of<CheckpointError>([&] { other->load_checkpoint(folder.path()); }), "are damaged");
      }
      trainee->steps(2);
    }
    expect_same(other.weights(), straight.weights());
  });
}

TEST_P(EngineCheckpoint, SavedInTheBackgroundIsThatOfItsMoment) {
  const CapturedLog quiet;
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Config config = adam_config(GetParam());
    config.checkpoint.async_save = true;
    config.checkpoint.keep_last = 2;
    Trainee straight(rank, config);
    for (int i = 0; i < 4; ++i) {
      straight.step();
      EXPECT_TRUE(straight->save_checkpoint(folder.path()).in_background);
    }
    straight.steps(2);
    ASSERT_TRUE(straight->wait_for_checkpoint());
    EXPECT_EQ(complete_tags(folder.path()), (std::vector<std::string>{"global_step3", "global_step4"}));

    Trainee other(rank, config);
    ASSERT_TRUE(other->load_checkpoint(folder.path()));
    other.steps(2);
    expect_same(other.weights(), straight.weights());
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, EngineCheckpoint, ::testing::ValuesIn(all_stages()), name_of_stage);

}  // namespace
}  // namespace trireme
