// The record of a program's run: its lines, what a resumed run keeps, and what is refused or survived.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/support/captured_log.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/engine/engine.h"
#include "trireme/engine/model_engine.h"
#include "trireme/observe/metrics.h"

namespace trireme {
namespace {

using namespace testing;

Config recording(const std::filesystem::path& folder, int world, int64_t accumulation = 1) {
  Config config = sgd_config(world, accumulation);
  config.observe.record = folder.string();
  return config;
}

template <class Engine>
void train(Engine& engine, int steps) {
  for (int step = 0; step < steps; ++step) {
    engine.backward(engine(vec(1, 1)));
    engine.step();
  }
}

std::vector<int64_t> steps_of(const RunLog& log) {
  std::vector<int64_t> steps;
  for (const StepMetrics& step : log.steps) steps.push_back(step.step);
  return steps;
}

TEST(Record, HasALineForEachStepAndAReport) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = recording(folder / "run", 2)});
    engine.events().set_tokens_per_sample(10);
    for (int step = 0; step < 2; ++step) {
      engine.backward(engine(vec(1 + rank.id(), 1)));
      engine.step();
    }
    engine.save_checkpoint(folder / "saved");
  });
  const RunLog log = read_metrics(folder / "run" / "metrics.jsonl");
  ASSERT_TRUE(log.run && log.end);
  EXPECT_EQ(log.run->ranks, 2);
  EXPECT_EQ(log.run->parameters, 2);
  EXPECT_EQ(log.end->step, 2);
  ASSERT_EQ(steps_of(log), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(log.steps[0].loss, 5);  // of rank 0: w·(1, 1) with w = (2, 3)
  EXPECT_EQ(log.steps[1].loss, 3.75);
  EXPECT_EQ(log.steps[1].learning_rate, 0.5);
  EXPECT_EQ(log.steps[1].samples, 4);
  EXPECT_EQ(log.steps[1].tokens, 40);
  EXPECT_GT(log.steps[1].step_ms, 0);
  EXPECT_GT(log.steps[1].tokens_per_s, 0);
  ASSERT_EQ(log.checkpoints.size(), 1u);
  EXPECT_EQ(log.checkpoints[0].tag, "global_step2");
  EXPECT_TRUE(std::filesystem::exists(folder / "run" / "report.html"));
}

TEST(Record, HasTheMeanLossOfAWindowBesideMonitors) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    Config config = recording(folder.path(), 1, /*accumulation=*/2);
    config.monitors.csv_monitor = {.enabled = true, .output_path = folder.path().string(), .job_name = "job"};
    auto engine = initialize(rank.world(), net, {.config = config});
    for (const int64_t x : {1, 3}) {
      engine.backward(engine(vec(x, 0)));
      engine.step();
    }
    engine.destroy();
  });
  const RunLog log = read_metrics(folder / "metrics.jsonl");
  ASSERT_EQ(log.steps.size(), 1u);
  EXPECT_EQ(log.steps[0].loss, 4);
  EXPECT_TRUE(std::filesystem::exists(folder / "job" / "Train_Samples_train_loss.csv"));
}

TEST(Record, OfALossThatTheEngineDoesNotSeeHasNone) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = recording(folder.path(), 1)});
    engine(vec(1, 0)).backward();
    engine.step();
  });
  const RunLog log = read_metrics(folder / "metrics.jsonl");
  ASSERT_EQ(log.steps.size(), 1u);
  EXPECT_FALSE(log.steps[0].loss);
  EXPECT_EQ(log.steps[0].learning_rate, 0.5);
}

TEST(Record, GoesOnBehindTheStepThatARunResumesFrom) {
  const TemporaryFolder folder;
  const auto run = [&](int steps, bool resumes) {
    run_ranks(1, [&](Rank& rank) {
      Dot net;
      auto engine = initialize(rank.world(), net, {.config = recording(folder / "run", 1)});
      if (resumes) engine.load_checkpoint(folder / "saved");
      train(engine, steps);
      if (!resumes) engine.save_checkpoint(folder / "saved");
      if (!resumes) train(engine, 2);  // which a crash would lose
    });
    return read_metrics(folder / "run" / "metrics.jsonl");
  };
  EXPECT_EQ(steps_of(run(2, false)), (std::vector<int64_t>{1, 2, 3, 4}));
  const RunLog resumed = run(1, true);
  EXPECT_EQ(steps_of(resumed), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(resumed.run->first_step, 2);
  EXPECT_FALSE(std::filesystem::exists(folder / "run" / "metrics.before.jsonl"));
  // A run that begins anew keeps the older one.
  EXPECT_EQ(steps_of(run(1, false)), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(steps_of(read_metrics(folder / "run" / "metrics.before.jsonl")), (std::vector<int64_t>{1, 2, 3}));
}

TEST(Record, IsRefusedOnEveryRankBeforeTheModuleIsChanged) {
  const TemporaryFolder folder;
  std::ofstream(folder / "file") << "a";
  const auto refusals = [&](bool has_another) {
    std::vector<std::string> texts(2);
    run_ranks(2, [&](Rank& rank) {
      Dot first, net;
      const auto another = has_another
                               ? std::make_unique<Engine>(rank.world(), *first,
                                                          InitializeOptions{.config = recording(folder / "run", 2)})
                               : nullptr;
      Config config = recording(has_another ? folder / "run" : folder / "file", 2);
      config.precision.weight_dtype = at::kBFloat16;
      try {
        initialize(rank.world(), net, {.config = config});
      } catch (const Error& error) {
        texts[static_cast<size_t>(rank.id())] = error.what();
      }
      EXPECT_EQ(net->w.scalar_type(), at::kFloat);
    });
    return texts;
  };
  for (const std::string& text : refusals(false))
    EXPECT_NE(text.find("`trireme.record` is \"" + (folder / "file").string()), std::string::npos) << text;
  for (const std::string& text : refusals(true))
    EXPECT_NE(text.find("where another engine of this process writes its record"), std::string::npos) << text;
}

TEST(Record, ThatCannotGoOnIsAWarningOnce) {
  const TemporaryFolder folder;
  CapturedLog log;
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = recording(folder / "run", 1)});
    std::filesystem::remove_all(folder / "run");
    train(engine, 3);
    EXPECT_EQ(engine.global_steps(), 3);
  });
  const std::string text = "`trireme.record`: the record lacks what could not be written, and training goes on";
  EXPECT_NE(log.text().find(text), std::string::npos);
  EXPECT_EQ(log.text().find(text), log.text().rfind(text));
}

}  // namespace
}  // namespace trireme
