// Hybrid sharding by configuration: MiCS (FSDP's HYBRID_SHARD) and ZeRO++'s hpZ on four ranks, two by two.
#include <gtest/gtest.h>

#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "comm/call.h"
#include "tests/parity/cases.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/engine/engine.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int kHybridRanks = 4, kHybridSteps = 5;

Config hybrid_config(int stage, const char* key, int size, const char* gather = "auto", int ranks = kHybridRanks) {
  Json json = {{"train_micro_batch_size_per_gpu", 1},
               {"gradient_accumulation_steps", 2},
               {"gradient_clipping", 0.5},
               {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 2e-3}, {"weight_decay", 0.05}}}}},
               {"zero_optimization", {{"stage", stage}}},
               {"trireme", {{"gather", gather}, {"merge_below_bytes", 0}}}};
  if (key != nullptr) json["zero_optimization"][key] = size;
  return config_from_json(json, ranks);
}

struct HybridOutcome {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> weights;
};

/// Steps [begin, end); from the checkpoint in `folder` where `begin` is not 0, and saved there.
HybridOutcome train_sharded(const Config& config, int begin = 0, int end = kHybridSteps,
                            const std::filesystem::path& folder = {}, int ranks = kHybridRanks) {
  HybridOutcome outcome;
  run_ranks(ranks, [&](Rank& rank) {
    at::set_num_threads(1);
    const TrainedModel model = make_llama();
    Engine engine(rank.world(), *model.module, {.config = config});
    if (begin > 0) engine.load_checkpoint(folder);
    for (int step = begin; step < end; ++step)
      for (int micro = 0; micro < 2; ++micro) {
        const int64_t round = 2 * step + micro;
        const at::Tensor loss = engine.backward(model.loss({round * ranks + rank.id(), round}));
        engine.step();
        if (rank.id() == 0) outcome.losses.push_back(loss.item<double>());
      }
    if (!folder.empty()) engine.save_checkpoint(folder);
    engine.destroy();
    if (rank.id() == 0) outcome.weights = parameters_of(*model.module);
  });
  return outcome;
}

void expect_same_training(const HybridOutcome& got, const HybridOutcome& expected) {
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i) EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-6);
  for (const auto& [name, weight] : expected.weights)
    EXPECT_TRUE(got.weights.at(name).allclose(weight, 1e-5, 1e-5)) << name;
}

TEST(HybridSharding, TrainsAsShardingOverAllRanks) {
  for (const char* gather : {"shared", "copy"}) {
    const HybridOutcome expected = train_sharded(hybrid_config(3, nullptr, 0, gather));
    for (int stage = 1; stage <= 3; ++stage) {
      SCOPED_TRACE(str(gather, ", mics, ZeRO ", stage));
      expect_same_training(train_sharded(hybrid_config(stage, "mics_shard_size", 2, gather)), expected);
    }
    expect_same_training(train_sharded(hybrid_config(3, "zero_hpz_partition_size", 2, gather)), expected);
  }
}

TEST(HybridSharding, CheckpointsAtAnyOtherSharding) {
  const HybridOutcome expected = train_sharded(hybrid_config(3, nullptr, 0));
  for (const char* key : {"mics_shard_size", "zero_hpz_partition_size"}) {
    const TemporaryFolder folder;
    HybridOutcome outcome = train_sharded(hybrid_config(3, key, 2), 0, 2, folder.path());
    const HybridOutcome middle = train_sharded(hybrid_config(2, nullptr, 0), 2, 3, folder.path());
    const HybridOutcome end = train_sharded(hybrid_config(3, key, 2), 3, kHybridSteps, folder.path());
    for (const HybridOutcome* part : {&middle, &end})
      outcome.losses.insert(outcome.losses.end(), part->losses.begin(), part->losses.end());
    outcome.weights = end.weights;
    expect_same_training(outcome, expected);
  }
}

/// A group whose ranks share no memory, as those of several hosts, and what each of its kind sends of floating numbers.
class Apart final : public comm::Backend {
 public:
  using Bytes = std::map<std::string, int64_t>;  ///< by the group's name

  Apart(Group& world, std::shared_ptr<Bytes> sent)
      : Backend(world.backend().state()), group_(world.backend()), sent_(std::move(sent)) {}
  Apart(std::unique_ptr<Backend> own, std::shared_ptr<Bytes> sent)
      : Backend(own->state()), own_(std::move(own)), group_(*own_), sent_(std::move(sent)) {}

  Pending<void> submit(comm::Request request) override {
    if (at::isFloatingType(request.call.dtype) && request.call.dtype != at::kDouble)
      (*sent_)[info().name] += comm::bytes_sent(info().place, request.call);
    return group_.submit(std::move(request));
  }
  std::unique_ptr<Backend> split(const comm::Split& split) override {
    auto group = group_.split(split);
    if (!group) return nullptr;
    return std::make_unique<Apart>(std::move(group), sent_);
  }

 private:
  const std::unique_ptr<Backend> own_;
  Backend& group_;
  const std::shared_ptr<Bytes> sent_;
};

/// Writes to stderr what its rank sends in a step of two micro-batches, and holds after it, in bytes, and the sizes of
/// units in elements, with padding. `argument`: a stage and a key of two ranks.
int measure_traffic(Group& given, const std::string& argument) {
  at::set_num_threads(1);
  Config config = hybrid_config(argument[0] - '0', argument.c_str() + 2, 2, "copy");
  config.pager.live_bytes = 0;
  const auto sent = std::make_shared<Apart::Bytes>();
  Group world(std::make_unique<Apart>(given, sent));
  const TrainedModel model = make_llama();
  Engine engine(world, *model.module, {.config = config});
  for (int step = 0; step < 2; ++step) {
    sent->clear();
    for (int micro = 0; micro < 2; ++micro) {
      engine.backward(model.loss({2 * world.rank() + micro, step}));
      engine.step();
    }
  }
  const PagerMemory memory = engine.pager().memory();
  Json traffic = {{"gradients", (*sent)["shards/gradients"]},
                  {"gathers", (*sent)["shards"]},
                  {"across", (*sent)["replicas"]},
                  {"world", (*sent)["world"]},
                  {"weights", memory.weight_bytes},
                  {"sums", memory.gradient_bytes},
                  {"states", 0},
                  {"units", Json::array()}};
  for (const auto& unit : engine.pager().layout().units) traffic["units"].push_back(unit.numel());
  for (const OwnedSlice& slice : engine.pager().owned())
    traffic["states"] = traffic["states"].get<int64_t>() + 2 * 4 * slice.weights.numel();
  std::cerr << traffic.dump() << std::endl;
  engine.destroy();
  return 0;
}

/// Two replicas of two shards, in processes. A reduce-scatter or all-gather over two ranks sends half of what there is
/// in fp32, an all-reduce all of it.
TEST(HybridSharding, BytesAndMemoryAreThoseOfTheClosedForm) {
  const auto expect_closed_form = [](const std::string& key, int stage, int owners) {
    const std::vector<ProcessResult> results =
        run_processes(kHybridRanks, measure_traffic, {.argument = str(stage, " ", key)});
    for (int rank = 0; rank < kHybridRanks; ++rank) {
      SCOPED_TRACE(str(key, ", stage ", stage, ", rank ", rank));
      ASSERT_EQ(results[rank].exit_code, 0) << results[rank].error_text;
      const std::string& text = results[rank].error_text;
      const Json traffic = Json::parse(text.substr(text.rfind('{')));
      const auto units = traffic["units"].get<std::vector<int64_t>>();
      const int64_t elements = std::accumulate(units.begin(), units.end(), int64_t{0});
      const int64_t all = elements * 4, half = all / 2, micro_batches = 2;
      EXPECT_EQ(traffic["gradients"], (stage == 1 ? 1 : micro_batches) * half);
      // Forward gathers all, backward the first of two layers once more: it does not read the embedding, and the last
      // layer and what comes behind it are still there. The next forward finds the first layer.
      const int64_t first_layer = units[1] * 4 / 2;
      EXPECT_EQ(traffic["gathers"], stage < 3 ? half : micro_batches * half + first_layer) << text;
      EXPECT_EQ(traffic["across"], half);
      EXPECT_EQ(traffic["world"], 0);
      EXPECT_EQ(traffic["weights"], stage < 3 ? all : half);
      EXPECT_EQ(traffic["sums"], stage < 2 ? all : half);
      EXPECT_EQ(traffic["states"], 2 * all / owners);
    }
  };
  for (int stage = 1; stage <= 3; ++stage) expect_closed_form("mics_shard_size", stage, 2);
  expect_closed_form("zero_hpz_partition_size", 3, 4);
}

/// A group whose sums of gradients are left out.
class WithoutSums final : public comm::Backend {
 public:
  explicit WithoutSums(std::unique_ptr<Backend> group) : Backend(group->state()), group_(std::move(group)) {}

  Pending<void> submit(comm::Request request) override {
    const bool is_sum = request.call.kind == comm::CallKind::kAllReduce && request.output.is_floating_point();
    return is_sum ? Pending<void>() : group_->submit(std::move(request));
  }
  std::unique_ptr<Backend> split(const comm::Split& split) override { return group_->split(split); }

 private:
  const std::unique_ptr<Backend> group_;
};

/// A world of which the replicas do not add up their gradients.
class WorldWithoutReplicaSums final : public comm::Backend {
 public:
  explicit WorldWithoutReplicaSums(Group& world) : Backend(world.backend().state()), world_(world.backend()) {}

  Pending<void> submit(comm::Request request) override { return world_.submit(std::move(request)); }
  std::unique_ptr<Backend> split(const comm::Split& split) override {
    auto group = world_.split(split);
    if (split.info.name.find("replicas") == std::string::npos) return group;
    return std::make_unique<WithoutSums>(std::move(group));
  }

 private:
  Backend& world_;
};

TEST(HybridSharding, ASumOverReplicasThatIsLeftOutIsNamedBeforeTheFirstUpdate) {
  for (const bool is_planted : {false, true}) {
    std::vector<std::string> texts(kHybridRanks);
    std::vector<bool> has_changed(kHybridRanks);
    run_ranks(kHybridRanks, [&](Rank& rank) {
      at::set_num_threads(1);
      std::unique_ptr<comm::Backend> faulty;
      if (is_planted) faulty = std::make_unique<WorldWithoutReplicaSums>(rank.world());
      std::optional<Group> own;
      if (faulty) own.emplace(std::move(faulty));
      const TrainedModel model = make_llama();
      Engine engine(own ? *own : rank.world(), *model.module,
                    {.config = hybrid_config(2, "mics_shard_size", 2, "copy")});
      const auto before = parameters_of(*model.module);
      try {
        for (int micro = 0; micro < 2; ++micro) {
          engine.backward(model.loss({2 * rank.id() + micro, 0}));
          engine.step();
        }
      } catch (const StateError& error) {
        texts[static_cast<size_t>(rank.id())] = error.what();
      }
      for (const auto& [name, weight] : parameters_of(*model.module))
        if (!weight.equal(before.at(name))) has_changed[static_cast<size_t>(rank.id())] = true;
    });
    for (int rank = 0; rank < kHybridRanks; ++rank) {
      EXPECT_EQ(has_changed[static_cast<size_t>(rank)], !is_planted);
      EXPECT_EQ(texts[static_cast<size_t>(rank)].find("a sum over the axis \"replica\" is wrong") != std::string::npos,
                is_planted)
          << texts[static_cast<size_t>(rank)];
    }
  }
}

TEST(HybridSharding, IsRefusedWhereItMeansNothing) {
  const auto refusal = [](int stage, const char* key, int size) -> std::string {
    try {
      (void)hybrid_config(stage, key, size);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(
      refusal(3, "mics_shard_size", 3),
      "<json>: `zero_optimization.mics_shard_size` = 3 does not divide the 4 data-parallel ranks; choose a divisor, "
      "or another number of ranks");
  EXPECT_EQ(refusal(0, "mics_shard_size", 2),
            "<json>: `zero_optimization.mics_shard_size` = 2 at ZeRO stage 0; set `zero_optimization.stage` to 1, 2 or "
            "3, or remove the key");
  EXPECT_EQ(refusal(2, "zero_hpz_partition_size", 2),
            "<json>: `zero_optimization.zero_hpz_partition_size` = 2 at ZeRO stage 2; set `zero_optimization.stage` to "
            "3, or remove the key");
  EXPECT_EQ(refusal(3, "mics_shard_size", 0),
            "<json>: `zero_optimization.mics_shard_size` is 0; expected a number of ranks, or -1");
  Json json = {{"train_micro_batch_size_per_gpu", 1},
               {"deterministic", true},
               {"zero_optimization", {{"stage", 3}, {"mics_shard_size", 2}}}};
  EXPECT_THROW((void)config_from_json(json, kHybridRanks), ConfigError);
  EXPECT_THROW((void)default_config(kHybridRanks, {.replicas = 2}), ConfigError);
}

}  // namespace
}  // namespace trireme
