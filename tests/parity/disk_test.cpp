// Optimizer states on disk: the bits of those in memory, at every stage and in every precision, through checkpoints and
// under the functions that read and write states. Faults of a disk are named, and nothing that they spoilt is used.
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/parity/on_disk.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"

namespace trireme {
namespace {

using namespace testing;

DiskSpace disk_in(const TemporaryFolder& folder, int buffers = 2) {
  return {.folder = folder.path().string(), .buffers = buffers, .block_numel = 4096};
}

class OnDisk : public ::testing::TestWithParam<std::tuple<ZeroStage, Precision>> {
 protected:
  static void compare(const std::vector<std::string>& optimizers) {
    const auto& [stage, precision] = GetParam();
    for (const ModelCase& model_case : kDiskModels)
      for (const std::string& name : optimizers) {
        if (precision.name == "Low" && name == "Lion") continue;  // which has no update in it
        SCOPED_TRACE(model_case.name + " " + name);
        const TemporaryFolder folder;
        Config config = disk_config(2, stage.policy, kOptimizers.at(name), precision.options);
        const ByName expected = trained(model_case, config, 2);
        config.disk = disk_in(folder, name == "AdamW" ? 5 : 2);
        expect_equal(trained(model_case, config, 2), expected);
        EXPECT_EQ(folder.names(), std::vector<std::string>());
      }
  }
};

TEST_P(OnDisk, HaveTheBitsOfThoseInMemory) { compare({"AdamW"}); }

class SlowOnDisk : public OnDisk {};

TEST_P(SlowOnDisk, HaveTheBitsOfThoseInMemoryWithEveryOptimizer) { compare(names_of_optimizers()); }

const auto kOfStages = ::testing::Combine(::testing::ValuesIn(kZeroStages), ::testing::ValuesIn(kPrecisions));
std::string name_of_case(const ::testing::TestParamInfo<std::tuple<ZeroStage, Precision>>& info) {
  return std::get<0>(info.param).name + std::get<1>(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(Stages, OnDisk, kOfStages, name_of_case);
INSTANTIATE_TEST_SUITE_P(SlowStages, SlowOnDisk, kOfStages, name_of_case);

// Units of a group without a state stay in memory, between others that are on disk.
TEST(OnDiskGroups, AreUpdatedInTheOrderOfTheUnits) {
  for (const Precision& precision : {kPrecisions[0], kPrecisions[1]}) {
    const auto run = [&](const TemporaryFolder* folder) {
      ByName tensors;
      run_ranks(2, [&](Rank& rank) {
        at::set_num_threads(1);
        const TrainedModel model = make_wide();
        Config config = disk_config(2, harsh_policy(2), kOptimizers.at("Momentum"), precision.options);
        if (folder) config.disk = disk_in(*folder);
        Engine engine(rank.world(), *model.module,
                      {.config = config, .parameter_groups = {{.patterns = {"^0\\."}, .momentum = 0.0}}});
        train(engine, model, rank, kDiskSteps);
        ByName own;
        for (const auto& item : model.module->named_parameters())
          own[item.key()] = *safe_get_full_fp32_param(item.value());
        engine.destroy();
        if (rank.id() == 0) tensors = own;
      });
      return tensors;
    };
    const TemporaryFolder folder;
    expect_equal(run(&folder), run(nullptr));
  }
}

TEST(OnDiskCheckpoints, GoOnBetweenDiskAndMemoryAtOtherNumbersOfRanks) {
  for (const Precision& precision : {kPrecisions[0], kPrecisions[1]})
    for (const bool async : {false, true})
      for (const bool saves_from_disk : {true, false}) {
        SCOPED_TRACE(precision.name + (saves_from_disk ? " from the disk" : " to the disk") + (async ? " async" : ""));
        const TemporaryFolder folder, saved;
        const auto config = [&](int world, bool on_disk) {
          Config config = disk_config(world, harsh_policy(world == 2 ? 3 : 1), kAdamW, precision.options);
          if (on_disk) config.disk = disk_in(folder);
          config.checkpoint.async_save = async;
          return config;
        };
        ByName before, after;
        run_ranks(2, [&](Rank& rank) {
          at::set_num_threads(1);
          const TrainedModel model = make_wide();
          Engine engine(rank.world(), *model.module, {.config = config(2, saves_from_disk)});
          train(engine, model, rank, 3);
          engine.save_checkpoint(saved.path());
          (void)engine.wait_for_checkpoint();
          const ByName own = tensors_of(*model.module, kAdamW);
          engine.destroy();
          if (rank.id() == 0) before = own;
        });
        run_ranks(3, [&](Rank& rank) {
          at::set_num_threads(1);
          const TrainedModel model = make_wide();
          Engine engine(rank.world(), *model.module, {.config = config(3, !saves_from_disk)});
          ASSERT_TRUE(engine.load_checkpoint(saved.path()));
          const ByName own = tensors_of(*model.module, kAdamW);
          engine.destroy();
          if (rank.id() == 0) after = own;
        });
        expect_equal(after, before);
      }
}

TEST(OnDiskAccess, ReadsAndWritesWholesAndParts) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    at::set_num_threads(1);
    const TrainedModel model = make_wide();
    Config config = disk_config(2, harsh_policy(2), kAdamW, kPrecisions[1].options);
    config.disk = disk_in(folder);
    Engine engine(rank.world(), *model.module, {.config = config});
    train(engine, model, rank, 1);
    const at::Tensor weight = model.module->parameters()[0];
    const at::Tensor value = at::full({190, 60}, 1.0 + 0x1p-20);
    safe_set_full_fp32_param(weight, value);
    EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(weight), value));
    safe_set_full_optimizer_state(weight, value * 3, "exp_avg_sq");
    EXPECT_TRUE(at::equal(*safe_get_full_optimizer_state(weight, "exp_avg_sq"), value * 3));
    EXPECT_FALSE(at::equal(*safe_get_full_optimizer_state(weight, "exp_avg"), value * 3));
    const at::Tensor part = *safe_get_local_optimizer_state(weight, "exp_avg");
    safe_set_local_optimizer_state(weight, part + 1, "exp_avg");
    EXPECT_TRUE(at::equal(*safe_get_local_optimizer_state(weight, "exp_avg"), part + 1));
    {
      const at::NoGradGuard no_grad;
      at::Tensor(weight).fill_(2);  // the program's write is the new truth
    }
    EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(weight), at::full({190, 60}, 2.0)));
    engine.destroy();
  });
}

TEST(OnDiskRefuse, WhatNeedsMoreThanABlockBeforeAnythingChanges) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    const TrainedModel model = make_wide();
    const ByName before = parameters_of(*model.module);
    for (const OptimizerKind kind : {OptimizerKind::kLamb, OptimizerKind::kMuon}) {
      Config config = disk_config(2, harsh_policy(1), {.kind = kind}, {});
      config.disk = disk_in(folder);
      const std::string text = error_of<ConfigError>([&] { Engine(rank.world(), *model.module, {.config = config}); });
      EXPECT_NE(text.find("offload_optimizer.device: \"nvme\" brings states block by block, and "), std::string::npos);
    }
    expect_equal(parameters_of(*model.module), before);
  });
}

TEST(OnDiskRefuse, ADiskThatIsFullOnEveryRankAndGiveTheModelBack) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    const TrainedModel model = make_wide();
    const ByName before = parameters_of(*model.module);
    Config config = disk_config(2, harsh_policy(3), kAdamW, {});
    config.disk = disk_in(folder);
    config.disk.make_file = full_on_rank_1(rank);
    const std::string text = error_of<Error>([&] { Engine(rank.world(), *model.module, {.config = config}); });
    EXPECT_NE(text.find(folder.path().string() + ": 4.4 TB are needed and "), std::string::npos) << text;
    expect_equal(parameters_of(*model.module), before);
  });
}

// One rank, so that a fault has one place; the transfers of three steps and a save, one fault in each of them.
TEST(OnDiskFaults, AreNamedAndTheirStatesAreNotUsedAgain) {
  const TemporaryFolder folder, saved;
  int faults = 0;
  for (int at = 0; at < 400; at += 3) {
    SCOPED_TRACE(at);
    bool failed = false;
    run_ranks(1, [&](Rank& rank) {
      at::set_num_threads(1);
      const TrainedModel model = make_wide();
      Config config = disk_config(1, harsh_policy(1), kAdamW, kPrecisions[1].options);
      config.disk = disk_in(folder);
      config.disk.make_file = [&](const std::string& where, int64_t bytes) {
        return std::make_unique<FailingFile>(make_disk_file(where, bytes), at);
      };
      std::unique_ptr<Engine> engine;
      const auto run = [&] {
        engine = std::make_unique<Engine>(rank.world(), *model.module, InitializeOptions{.config = config});
        train(*engine, model, rank, 3);
        engine->save_checkpoint(saved.path(), {.tag = "whole"});
      };
      try {
        run();
      } catch (const IoError& error) {
        failed = true;
        EXPECT_NE(std::string(error.what()).find("Input/output error"), std::string::npos) << error.what();
      }
      if (!failed || !engine) return;
      if (engine->global_steps() == 3) return;  // in the save, which may be tried again
      const std::string text = error_of<Error>([&] { engine->save_checkpoint(saved.path(), {.tag = "torn"}); });
      EXPECT_NE(text.find("save_checkpoint: this engine is spent"), std::string::npos) << text;
      EXPECT_FALSE(std::filesystem::exists(saved / "torn"));
    });
    if (!failed) break;
    ++faults;
  }
  EXPECT_GT(faults, 20);
}

// Every rank ends its step with the error of the one whose disk failed, and none trains on.
TEST(OnDiskFaults, OfOneRankEndTheStepOnEveryRank) {
  for (const bool are_weights : {false, true}) {
    const TemporaryFolder folder;
    std::vector<std::string> said(2), afterwards(2);
    run_ranks(2, [&](Rank& rank) {
      at::set_num_threads(1);
      const TrainedModel model = make_wide();
      Config config = disk_config(2, harsh_policy(are_weights ? 3 : 1), kAdamW, kPrecisions[1].options);
      bool fails = false;
      const auto make_file = [&](const std::string& where, int64_t bytes) {
        return std::make_unique<ReadOnlyFile>(make_disk_file(where, bytes), fails);
      };
      if (are_weights) config.pager.disk = {.folder = folder.path().string(), .make_file = make_file};
      config.disk = disk_in(folder);
      if (!are_weights) config.disk.make_file = make_file;
      Engine engine(rank.world(), *model.module, {.config = config});
      train(engine, model, rank, 2);
      fails = rank.id() == 1;
      said[rank.id()] = named_error_of([&] { train(engine, model, rank, 1); });
      EXPECT_EQ(engine.global_steps(), 2);
      for (const auto& call : std::vector<std::function<void()>>{
               [&] {
                 engine.backward(model.loss({0, 0}));
               },
               [&] { engine.step(); }, [&] { engine.save_checkpoint(folder.path() / "saved"); }})
        afterwards[rank.id()] += named_error_of(call) + "\n";
    });
    EXPECT_EQ(said[1], "IoError: the disk is read-only");
    EXPECT_EQ(said[0], "IoError: rank 1: the disk is read-only");
    for (const std::string& text : afterwards)
      for (const char* call : {"step", "save_checkpoint"})
        EXPECT_SAYS(text, str("StateError: ", call, ": this engine is spent"));
  }
}

}  // namespace
}  // namespace trireme
