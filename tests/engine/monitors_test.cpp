// The monitors of an engine: what they are told, by which rank, and what is refused before the module is changed.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/support/captured_log.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Config csv_config(const std::filesystem::path& folder, int world, int64_t accumulation = 1) {
  Config config = sgd_config(world, accumulation);
  config.monitors.csv_monitor = {.enabled = true, .output_path = folder.string(), .job_name = "job"};
  return config;
}

TEST(MonitorsOfAnEngine, AreToldOfEveryStepByRank0) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = csv_config(folder.path(), 2)});
    EXPECT_EQ(engine.events().is_empty(), rank.id() != 0);
    for (int step = 0; step < 2; ++step) {
      engine.backward(engine(vec(1 + rank.id(), 1)));
      engine.step();
    }
  });
  // Rank 0's loss is w·(1, 1): 2 + 3 at first; the mean gradient is (1.5, 1), and the learning rate 0.5.
  EXPECT_EQ(text_of(folder / "job" / "Train_Samples_train_loss.csv"), "step,train_loss\r\n2,5.0\r\n4,3.75\r\n");
  EXPECT_EQ(text_of(folder / "job" / "Train_Samples_lr.csv"), "step,lr\r\n2,0.5\r\n4,0.5\r\n");
  EXPECT_FALSE(std::filesystem::exists(folder / "job" / "Train_Samples_loss_scale.csv"));  // nothing is fp16
}

TEST(MonitorsOfAnEngine, GetTheMeanLossOfAWindowHoweverItIsDivided) {
  for (const bool is_divided : {false, true}) {
    const TemporaryFolder folder;
    run_ranks(1, [&](Rank& rank) {
      Dot net;
      auto engine = initialize(rank.world(), net, {.config = csv_config(folder.path(), 1, /*accumulation=*/2)});
      for (const int64_t x : {1, 3}) {
        const at::Tensor loss = engine(vec(x, 0));
        at::Tensor told = engine.backward(is_divided ? loss / 2 : loss, {.scale_wrt_gas = !is_divided});
        told.zero_();  // the program's
        engine.step();
      }
    });
    EXPECT_EQ(text_of(folder / "job" / "Train_Samples_train_loss.csv"), "step,train_loss\r\n2,4.0\r\n");
  }
}

TEST(MonitorsOfAnEngine, ForgetLossesWithTheGradientsOfTheirWindow) {
  std::vector<MonitorEvent> events;
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = csv_config(folder.path(), 1)});
    engine.events().add_monitor("of the program", [&](std::span<const MonitorEvent> told) {
      events.insert(events.end(), told.begin(), told.end());
    });
    engine.backward(engine(vec(100, 0)));
    engine.zero_grad();
    engine(vec(1, 0)).backward();  // of which the engine does not see the loss
    engine.step();
    engine.events().write(std::vector<MonitorEvent>{{"mine", 3, 1}});
  });
  EXPECT_EQ(events, (std::vector<MonitorEvent>{{"Train/Samples/lr", 0.5, 1}, {"mine", 3, 1}}));
  EXPECT_EQ(text_of(folder / "job" / "mine.csv"), "step,mine\r\n1,3.0\r\n");
}

TEST(MonitorsOfAnEngine, HaveTheLossScaleInFp16) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    Config config = csv_config(folder.path(), 1);
    config.precision.weight_dtype = at::kHalf;
    config.precision.loss_scale.initial_scale_power = 3;
    auto engine = initialize(rank.world(), net, {.config = config});
    engine.backward(engine(vec(1, 1).to(at::kHalf)));
    engine.step();
  });
  EXPECT_EQ(text_of(folder / "job" / "Train_Samples_loss_scale.csv"), "step,loss_scale\r\n1,8.0\r\n");
  EXPECT_EQ(text_of(folder / "job" / "Train_Samples_train_loss.csv"), "step,train_loss\r\n1,5.0\r\n");
}

TEST(MonitorsOfAnEngine, AreRefusedOnEveryRankBeforeTheModuleIsChanged) {
  const TemporaryFolder folder;
  std::ofstream(folder / "file") << "a";
  const auto refusal_of = [&](const auto& change) {
    std::vector<std::string> texts(2);
    run_ranks(2, [&](Rank& rank) {
      Dot net;
      Config config = csv_config(folder / "file", 2);
      config.precision.weight_dtype = at::kBFloat16;
      change(config.monitors);
      try {
        initialize(rank.world(), net, {.config = config});
      } catch (const Error& error) {
        texts[static_cast<size_t>(rank.id())] = error.what();
      }
      EXPECT_EQ(net->w.scalar_type(), at::kFloat);
    });
    return texts;
  };
  for (const std::string& text : refusal_of([](MonitorOptions&) {}))
    EXPECT_NE(text.find("`csv_monitor.output_path` is \"" + (folder / "file").string()), std::string::npos) << text;
  for (const std::string& text : refusal_of([](MonitorOptions& monitors) { monitors.wandb.enabled = true; }))
    EXPECT_NE(text.find("`wandb.enabled` = true needs Python"), std::string::npos) << text;
  for (const std::string& text : refusal_of([](MonitorOptions& monitors) { monitors.comet.enabled = true; }))
    EXPECT_NE(text.find("`comet.enabled` = true needs Python"), std::string::npos) << text;
}

}  // namespace
}  // namespace trireme
