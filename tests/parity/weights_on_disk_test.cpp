// Weights on disk (offload_param with "nvme"): the bits of weights in memory, with every optimizer and in every
// precision, through checkpoints, writes of the program and the functions for single parameters; and faults of the
// disk.
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/parity/on_disk.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/pager/init/gathered.h"

namespace trireme {
namespace {

using namespace testing;

/// Units come from the disk at every touch, or are read ahead and stay.
PagerPolicy policy_of(bool is_roomy) {
  PagerPolicy policy = harsh_policy(3, GatherPolicy::kCopy);
  if (is_roomy) policy.live_bytes = 40'000;
  return policy;
}

DiskSpace weights_in(const TemporaryFolder& folder, int buffers = 5) {
  return {.folder = folder.path().string(), .buffers = buffers};
}

class WeightsInAFile : public ::testing::TestWithParam<std::tuple<int, Precision>> {
 protected:
  static void compare(const std::vector<std::string>& optimizers) {
    const auto& [ranks, precision] = GetParam();
    for (const ModelCase& model_case : kDiskModels)
      for (const std::string& name : optimizers) {
        if (precision.name == "Low" && name == "Lion") continue;  // which has no update in it
        for (const bool is_roomy : {false, true}) {
          SCOPED_TRACE(str(model_case.name, " ", name, is_roomy ? " roomy" : ""));
          const TemporaryFolder folder;
          Config config = disk_config(ranks, policy_of(is_roomy), kOptimizers.at(name), precision.options);
          const ByName expected = trained(model_case, config, ranks);
          config.pager.disk = weights_in(folder, is_roomy ? 5 : 2);
          if (name == "AdamW") config.disk = {.folder = folder.path().string(), .block_numel = 4096};
          expect_equal(trained(model_case, config, ranks), expected);
          EXPECT_EQ(folder.names(), std::vector<std::string>());
        }
      }
  }
};

TEST_P(WeightsInAFile, HaveTheBitsOfThoseInMemory) { compare({"AdamW", "Momentum"}); }

class SlowWeightsInAFile : public WeightsInAFile {};

TEST_P(SlowWeightsInAFile, HaveTheBitsOfThoseInMemoryWithEveryOptimizer) { compare(names_of_optimizers()); }

const auto kOfRanks = ::testing::Combine(::testing::Values(1, 2), ::testing::ValuesIn(kPrecisions));
std::string name_of_ranks(const ::testing::TestParamInfo<std::tuple<int, Precision>>& info) {
  return str("Of", std::get<0>(info.param), std::get<1>(info.param).name);
}
INSTANTIATE_TEST_SUITE_P(Ranks, WeightsInAFile, kOfRanks, name_of_ranks);
INSTANTIATE_TEST_SUITE_P(SlowRanks, SlowWeightsInAFile, kOfRanks, name_of_ranks);

TEST(WeightsOnDiskMemory, IsWhatIsGathered) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    const TrainedModel model = make_wide();
    Config config = disk_config(2, policy_of(false), kAdamW, {});
    config.pager.disk = weights_in(folder);
    Engine engine(rank.world(), *model.module, {.config = config});
    train(engine, model, rank, 1);
    const PagerMemory memory = engine.pager().memory();
    EXPECT_EQ(memory.weight_bytes, 0);
    const DiskUse use = engine.disk_use();
    EXPECT_GE(use.bytes, 4 * (2 * 60 * 190 + 250) / 2);
    EXPECT_GE(use.read_bytes, use.bytes);
    EXPECT_GE(use.written_bytes, use.bytes);
    EXPECT_GT(use.wait_s, 0);
    EXPECT_GT(memory.peak_live_bytes, 0);
    engine.destroy();
  });
}

TEST(WeightsOnDiskCheckpoints, GoOnBetweenDiskAndMemoryAtOtherNumbersOfRanks) {
  for (const Precision& precision : {kPrecisions[0], kPrecisions[1]})
    for (const bool async : {false, true})
      for (const bool saves_from_disk : {true, false}) {
        SCOPED_TRACE(precision.name + (saves_from_disk ? " from the disk" : " to the disk") + (async ? " async" : ""));
        const TemporaryFolder folder, saved;
        const auto config = [&](int world, bool on_disk) {
          Config config = disk_config(world, policy_of(true), kAdamW, precision.options);
          if (on_disk) config.pager.disk = weights_in(folder);
          config.checkpoint.async_save = async;
          return config;
        };
        ByName before, after;
        run_ranks(2, [&](Rank& rank) {
          at::set_num_threads(1);
          const TrainedModel model = make_wide();
          model.module->parameters()[1].set_requires_grad(false);
          Engine engine(rank.world(), *model.module, {.config = config(2, saves_from_disk)});
          train(engine, model, rank, 3);
          engine.save_checkpoint(saved.path());
          (void)engine.wait_for_checkpoint();
          train(engine, model, rank, 2);
          const ByName own = parameters_of(*model.module);
          engine.destroy();
          if (rank.id() == 0) before = own;
        });
        run_ranks(2, [&](Rank& rank) {
          at::set_num_threads(1);
          const TrainedModel model = make_wide();
          model.module->parameters()[1].set_requires_grad(false);
          Engine engine(rank.world(), *model.module, {.config = config(2, !saves_from_disk)});
          train(engine, model, rank, 1);  // what was gathered is not the checkpoint's
          ASSERT_TRUE(engine.load_checkpoint(saved.path()));
          train(engine, model, rank, 2);
          const ByName own = parameters_of(*model.module);
          engine.destroy();
          if (rank.id() == 0) after = own;
        });
        expect_equal(after, before);
        run_ranks(3, [&](Rank& rank) {
          at::set_num_threads(1);
          const TrainedModel model = make_wide();
          model.module->parameters()[1].set_requires_grad(false);
          Engine engine(rank.world(), *model.module, {.config = config(3, !saves_from_disk)});
          ASSERT_TRUE(engine.load_checkpoint(saved.path()));
          engine.destroy();
        });
      }
}

TEST(WeightsOnDiskAccess, TakesWhatTheProgramWrites) {
  const TemporaryFolder folder;
  for (const bool on_disk : {false, true}) {
    for (const Precision& precision : {kPrecisions[0], kPrecisions[1]}) {
      SCOPED_TRACE(str(precision.name, on_disk));
      run_ranks(2, [&](Rank& rank) {
        at::set_num_threads(1);
        const TrainedModel model = make_wide();
        Config config = disk_config(2, policy_of(false), kAdamW, precision.options);
        if (on_disk) config.pager.disk = weights_in(folder);
        Engine engine(rank.world(), *model.module, {.config = config});
        train(engine, model, rank, 1);
        const at::Tensor weight = model.module->parameters()[0], bias = model.module->parameters()[1];
        const at::Tensor value = at::full({190, 60}, 0.75);
        safe_set_full_fp32_param(weight, value);
        EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(weight), value));
        EXPECT_TRUE(at::equal(whole_weight(weight).to(at::kFloat), value));
        const at::Tensor part = *safe_get_local_fp32_param(weight);
        safe_set_local_fp32_param(weight, part * 2);
        EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(weight), value * 2));
        {
          const at::NoGradGuard no_grad;
          at::Tensor(weight).fill_(2);  // the program's write is the new truth
          at::Tensor(bias).mul_(0);
        }
        EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(weight), at::full({190, 60}, 2.0)));
        zero::GatheredParameters whole({bias}, {.modifier_rank = 1});
        if (rank.id() == 1) {
          const at::NoGradGuard no_grad;
          at::Tensor(bias).fill_(3);
        }
        whole.close();
        EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(bias), at::full({190}, 3.0)));
        train(engine, model, rank, 1);
        EXPECT_FALSE(at::equal(*safe_get_full_fp32_param(weight), at::full({190, 60}, 2.0)));
        EXPECT_LT((*safe_get_full_fp32_param(weight) - 2).abs().max().item<double>(), 0.01);
        engine.destroy();
        EXPECT_LT((weight.to(at::kFloat) - 2).abs().max().item<double>(), 0.01);
      });
    }
  }
}

TEST(WeightsOnDiskRefuse, WhatTheyDoNotServeBeforeAnythingChanges) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    const TrainedModel model = make_wide();
    const ByName before = parameters_of(*model.module);
    const auto refusal = [&](const PagerPolicy& policy, const OptimizerOptions& optimizer) {
      Config config = disk_config(2, policy, optimizer, {});
      config.pager.disk = weights_in(folder);
      return error_of<ConfigError>([&] { Engine(rank.world(), *model.module, {.config = config}); });
    };
    const std::string key = "zero_optimization.offload_param.device: \"nvme\" ";
    EXPECT_SAYS(refusal(policy_of(false), {.kind = OptimizerKind::kLamb}),
                key + "brings weights unit by unit, and Lamb");
    EXPECT_SAYS(refusal(harsh_policy(2), kAdamW), "\"nvme\" keeps the shards of ZeRO stage 3 on disk, and");
    EXPECT_SAYS(refusal(harsh_policy(3, GatherPolicy::kShared), kAdamW),
                "\"nvme\" and `trireme.gather`: \"shared\" exclude each other");
    expect_equal(parameters_of(*model.module), before);
  });
}

TEST(WeightsOnDiskRefuse, ADiskThatIsFullOnEveryRankAndLeaveTheModel) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    const TrainedModel model = make_wide();
    const ByName before = parameters_of(*model.module);
    Config config = disk_config(2, policy_of(false), kAdamW, {});
    config.pager.disk = weights_in(folder);
    config.pager.disk.make_file = full_on_rank_1(rank);
    const std::string text = error_of<IoError>([&] { Engine(rank.world(), *model.module, {.config = config}); });
    EXPECT_NE(text.find("offload_param.nvme_path: " + folder.path().string() + ": 4.4 TB are needed and "),
              std::string::npos)
        << text;
    expect_equal(parameters_of(*model.module), before);
  });
}

// A read that fails has spoilt nothing and may be tried again; after a write that failed nothing is used.
TEST(WeightsOnDiskFaults, AreNamedAndNoWrongWeightIsUsed) {
  const TemporaryFolder folder, saved;
  Config config = disk_config(1, policy_of(false), kAdamW, kPrecisions[1].options);
  const ByName expected = trained({"Wide", make_wide}, config, 1);
  int faults = 0, torn = 0;
  for (int at = 0; at < 400; ++at) {
    SCOPED_TRACE(at);
    bool failed = false;
    run_ranks(1, [&](Rank& rank) {
      at::set_num_threads(1);
      const TrainedModel model = make_wide();
      config.pager.disk = weights_in(folder, 2);
      config.pager.disk.make_file = [&](const std::string& where, int64_t bytes) {
        return std::make_unique<FailingFile>(make_disk_file(where, bytes), at);
      };
      std::unique_ptr<Engine> engine;
      try {
        engine = std::make_unique<Engine>(rank.world(), *model.module, InitializeOptions{.config = config});
        train(*engine, model, rank, kDiskSteps);
      } catch (const IoError& error) {
        failed = true;
        EXPECT_NE(std::string(error.what()).find("Input/output error"), std::string::npos) << error.what();
      }
      if (!failed || !engine) return;
      std::string text;
      try {
        engine->save_checkpoint(saved.path(), {.tag = str("after", at)});
      } catch (const Error& error) {
        text = error.what();
      }
      if (text.empty()) return;
      ++torn;
      EXPECT_TRUE(text.find("weights on disk: not all was written") != std::string::npos ||
                  text.find("save_checkpoint: this engine is spent") != std::string::npos)
          << text;
      EXPECT_FALSE(std::filesystem::exists(saved / str("after", at)));
    });
    if (!failed) break;
    ++faults;
  }
  EXPECT_GT(faults, 30);
  EXPECT_GT(torn, 5);
}

}  // namespace
}  // namespace trireme
