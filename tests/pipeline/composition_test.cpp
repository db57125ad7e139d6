// Stages beside tied weights, precision, recomputation, checkpoints, frozen layers, changing shapes.
#include <gtest/gtest.h>

#include <ATen/ops/dropout.h>
#include <ATen/record_function.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <thread>

#include "tests/pipeline/pipelines.h"
#include "tests/support/error_of.h"
#include "tests/support/parameters.h"
#include "tests/support/temporary_folder.h"
#include "trireme/device/device.h"
#include "trireme/zero.h"

namespace trireme {
namespace {

using pipeline_testing::Outcome;
using pipeline_testing::Recipe;
using pipeline_testing::train_in_stages;
using pipeline_testing::train_whole;
using pipeline_testing::weights_of;
using testing::error_of;
using testing::TemporaryFolder;

void expect_close(const Outcome& expected, const Outcome& got, double tolerance) {
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i) EXPECT_NEAR(got.losses[i], expected.losses[i], tolerance);
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (const auto& [name, weight] : expected.weights) {
    ASSERT_TRUE(got.weights.contains(name)) << name;
    EXPECT_LE((got.weights.at(name) - weight).abs().max().item<double>(), tolerance) << name;
  }
}

void expect_same(const Recipe& recipe) { expect_close(train_whole(recipe), train_in_stages(recipe), 0); }

TEST(Tied, DeterministicHasTheBitsOfTheModelWithoutStages) {
  for (const char* schedule : {"1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"})
    for (const int data : {1, 2})
      for (int zero = 0; zero <= 3; ++zero) {
        SCOPED_TRACE(str(schedule, ", data ", data, ", ZeRO ", zero));
        expect_same({.data = data,
                     .stages = 2,
                     .schedule = schedule,
                     .tied = true,
                     .steps = 10,
                     .configure = [&](Config& config) {
                       config.pager.stage = zero;
                       config.pager.deterministic = true;
                     }});
      }
}

TEST(Tied, OnceAWindowIsWithinTheRoundingOfASum) {
  for (int zero = 0; zero <= 3; ++zero) {
    const Recipe recipe{
        .data = 2, .stages = 2, .tied = true, .configure = [&](Config& config) { config.pager.stage = zero; }};
    expect_close(train_whole(recipe), train_in_stages(recipe), 1e-5);
  }
}

/// One process without an engine: the micro-batches of all data-parallel ranks, clipped, updated by torch's AdamW.
std::map<std::string, at::Tensor> train_plain(const Recipe& recipe) {
  pipeline_testing::Whole model(pipeline_testing::layers_of(recipe));
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.01));
  const int count = recipe.micro_batches * recipe.data;
  for (int step = 0; step < recipe.steps; ++step) {
    optimizer.zero_grad();
    for (int i = 0; i < recipe.micro_batches; ++i)
      for (int rank = 0; rank < recipe.data; ++rank) {
        const at::Tensor tokens = pipeline_testing::tokens_of(rank, step * recipe.micro_batches + i);
        const at::Tensor logits = model.forward(tokens.narrow(1, 0, pipeline_testing::kLength));
        (pipeline_testing::loss_of(logits, tokens.narrow(1, 1, pipeline_testing::kLength)) / count).backward();
      }
    torch::nn::utils::clip_grad_norm_(model.parameters(), 0.5);
    optimizer.step();
  }
  return testing::parameters_of(model);
}

TEST(Tied, AreThoseOfPlainPyTorchToAMillionthAfterTenSteps) {
  double largest = 0;
  for (const char* schedule : {"1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"})
    for (const int data : {1, 2})
      for (const bool deterministic : {false, true}) {
        SCOPED_TRACE(str(schedule, ", data ", data, ", deterministic ", deterministic));
        const Recipe recipe{
            .data = data, .stages = 2, .schedule = schedule, .tied = true, .configure = [=](Config& config) {
              config.pager.deterministic = deterministic;
            }};
        const Outcome got = train_in_stages(recipe);
        for (const auto& [name, weight] : train_plain(recipe)) {
          const double difference = (got.weights.at(name) - weight).abs().max().item<double>();
          largest = std::max(largest, difference);
          EXPECT_LE(difference, 1e-6) << name;
        }
      }
  std::cout << "tied weights differ from plain PyTorch's by " << largest << " at most\n";
}

/// Two linear layers of one shape, each with copies in other parts: "first" in the second part and the last one,
/// "second" in the third and the last one. So one stage has copies of both, in different chunks, and another owns them.
std::vector<LayerSpec> with_copies_in_several_chunks(std::vector<LayerSpec> layers, bool has_bias) {
  const auto linear = [&](const char* key, int layer) {
    LayerSpec spec = pipeline_testing::drawn<torch::nn::LinearImpl>(
        layer, torch::nn::LinearOptions(pipeline_testing::kHidden, pipeline_testing::kHidden).bias(has_bias));
    spec.forward = layers[1].forward;
    return tied(key, spec, has_bias ? std::vector<std::string>{"weight", "bias"} : std::vector<std::string>{"weight"});
  };
  const LayerSpec first = linear("first", 1), second = linear("second", 2);
  return {layers[0], first,     second,     // the first part
          first,     layers[3], layers[4],  // the second
          second,    layers[5], layers[6],  // the third
          second,    first,     layers[7]};
}

TEST(Tied, CopiesInSeveralChunksOfAStageSendTheirOwnGradients) {
  for (const char* schedule : {"interleaved", "zb-v", "dualpipe-v"})
    for (const int zero : {0, 3})
      for (const bool deterministic : {false, true})
        for (const bool has_bias : {false, true}) {
          SCOPED_TRACE(str(schedule, ", ZeRO ", zero, ", deterministic ", deterministic, ", bias ", has_bias));
          const Recipe recipe{
              .stages = 2,
              .schedule = schedule,
              .steps = 2,
              .configure =
                  [&](Config& config) {
                    config.pager.stage = zero;
                    config.pager.deterministic = deterministic;
                  },
              .change_layers = [&](auto layers) { return with_copies_in_several_chunks(std::move(layers), has_bias); }};
          expect_close(train_whole(recipe), train_in_stages(recipe), deterministic ? 0 : 1e-5);
        }
}

TEST(Precision, Bf16AndFp16HaveTheBitsOfTheModelWithoutStages) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    for (int zero = 0; zero <= 3; ++zero) {
      SCOPED_TRACE(str(dtype, ", ZeRO ", zero));
      expect_same({.data = 2, .stages = 2, .steps = 5, .configure = [&](Config& config) {
                     config.pager.stage = zero;
                     config.precision.weight_dtype = dtype;
                     if (dtype == at::kHalf) config.precision.loss_scale.initial_scale_power = 8;
                   }});
    }
}

TEST(Recomputation, HasTheBitsOfNone) {
  for (const char* schedule : {"1f1b", "zb-h1"})
    for (const int zero : {0, 3}) {
      SCOPED_TRACE(str(schedule, ", ZeRO ", zero));
      expect_same(
          {.stages = 2, .schedule = schedule, .steps = 3, .recomputed_layers = 2, .configure = [&](Config& config) {
             config.pager.stage = zero;
           }});
    }
}

TEST(GatheredWeights, HaveTheBitsOfSharedOnes) {
  for (const char* schedule : {"1f1b", "interleaved", "zb-v"}) {
    SCOPED_TRACE(schedule);
    expect_same({.data = 2, .stages = 2, .schedule = schedule, .steps = 3, .configure = [](Config& config) {
                   config.pager.stage = 3;
                   config.pager.gather = GatherPolicy::kCopy;
                   config.pager.poison = true;
                 }});
  }
}

/// How often stage 0 gathers a unit in one step of 4 micro-batches, on average over its units, after two that warm up.
double gathers_of(const char* schedule, int64_t live_bytes) {
  const Recipe recipe{.data = 2, .schedule = schedule, .configure = [=](Config& config) {
                        config.pager.stage = 3;
                        config.pager.gather = GatherPolicy::kCopy;
                        config.pager.live_bytes = live_bytes;
                      }};
  std::atomic<int64_t> gathers = 0, units = 0;
  run_ranks(4, [&](Rank& rank) {
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    auto engine =
        trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, rank.size())});
    const MicroBatches batches = pipeline_testing::batches_of(engine.group().rank());
    for (int step = 0; step < 2; ++step) (void)engine.train_batch(batches);
    const int64_t before = engine.pager().counters().gathers;
    (void)engine.train_batch(batches);
    if (rank.id() != 0) return;
    gathers = engine.pager().counters().gathers - before;
    units = std::ranges::count_if(engine.pager().parameters(), [](const auto& it) { return it.shape.size() == 2; });
  });
  return static_cast<double>(gathers) / static_cast<double>(std::max<int64_t>(units, 1));
}

TEST(GatheredWeights, StayWholeOverTheMicroBatchesOfAStepAsFarAsLiveBytesReach) {
  for (const char* schedule : {"1f1b", "zb-h1", "interleaved", "zb-v"}) {
    const double whole = gathers_of(schedule, int64_t{1} << 30), released = gathers_of(schedule, 0);
    std::cout << schedule << ": " << whole << " gathers of a unit in a step, " << released << " with live_bytes 0\n";
    EXPECT_EQ(whole, 1) << schedule;
    EXPECT_GE(released, 2.5) << schedule;  // the unit that was used last is still there where a pass turns back
  }
}

/// One step of 2 x 2 ranks with 8 micro-batches, after two that warm up.
struct Traffic {
  int64_t bytes = 0;      ///< sent to the other data-parallel rank, or read from it
  int64_t operators = 0;  ///< of all ranks and threads
};

Traffic traffic_of(int zero, bool whole_gradients) {
  const Recipe recipe{.data = 2, .micro_batches = 8, .configure = [=](Config& config) {
                        config.pager.stage = zero;
                        config.pipeline.whole_gradients = whole_gradients;
                      }};
  std::atomic<int64_t> bytes = 0, operators = 0;
  run_ranks(4, [&](Rank& rank) {
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    auto engine =
        trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, rank.size())});
    const MicroBatches batches = pipeline_testing::batches_of(engine.group().rank());
    // Each of two ranks sends half of its operand of a reduction, or has it read; no message of this group.
    const auto moved = [&] {
      return engine.group().counters().bytes_sent + engine.pager().counters().reduced_bytes / 2;
    };
    for (int step = 0; step < 2; ++step) (void)engine.train_batch(batches);
    rank.world().barrier();
    static std::atomic<int64_t>* counted = nullptr;
    at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
    if (rank.id() == 0) {
      counted = &operators;
      handle = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction&) {
                                       ++*counted;
                                       return std::unique_ptr<at::ObserverContext>();
                                     }).scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
    }
    rank.world().barrier();
    const int64_t before = moved();
    (void)engine.train_batch(batches);
    bytes += moved() - before;
    rank.world().barrier();
    if (rank.id() == 0) at::removeCallback(handle);
  });
  return {bytes, operators};
}

/// The reductions of one step of 2 x 2 ranks on stage 0 at ZeRO 2, in units of which a layer's weight and bias are one.
struct Sent {
  int64_t reductions = 0;
  int64_t reduced_bytes = 0;
  int64_t units = 0;
  int64_t unit_bytes = 0;  ///< of all units' gradients, whole
};

Sent sent_by(const Recipe& recipe) {
  Sent sent;
  run_ranks(4, [&](Rank& rank) {
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    auto engine =
        trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, rank.size())});
    const MicroBatches batches = pipeline_testing::batches_of(engine.group().rank());
    (void)engine.train_batch(batches);
    const PagerCounters before = engine.pager().counters();
    (void)engine.train_batch(batches);
    const PagerCounters after = engine.pager().counters();
    if (rank.id() != 0) return;
    sent = {.reductions = after.reductions - before.reductions,
            .reduced_bytes = after.reduced_bytes - before.reduced_bytes};
    for (const UnitLayout& unit : engine.pager().layout().units) {
      ++sent.units;
      sent.unit_bytes += unit.numel() * static_cast<int64_t>(sizeof(float));
    }
  });
  return sent;
}

Recipe of_two_chunks(const char* schedule, int micro_batches, bool deterministic) {
  return {.data = 2, .micro_batches = micro_batches, .schedule = schedule, .configure = [=](Config& config) {
            config.pager.stage = 2;
            config.pager.deterministic = deterministic;
          }};
}

TEST(Chunks, SendTheirOwnUnitsOncePerMicroBatch) {
  for (const char* schedule : {"interleaved", "zb-v", "dualpipe-v"})
    for (const bool deterministic : {false, true}) {
      SCOPED_TRACE(str(schedule, ", deterministic ", deterministic));
      for (const int micro_batches : {4, 8}) {
        const Sent sent = sent_by(of_two_chunks(schedule, micro_batches, deterministic));
        EXPECT_EQ(sent.units, 4);
        EXPECT_EQ(sent.reductions, micro_batches * sent.units);
        EXPECT_EQ(sent.reduced_bytes, micro_batches * sent.unit_bytes);
      }
    }
}

/// A wrong list of a part's parameters costs messages, never a gradient.
TEST(Chunks, GradientsOfUnitsThatWereNotExpectedAreSentAllTheSame) {
  for (const bool deterministic : {false, true}) {
    SCOPED_TRACE(deterministic);
    Recipe recipe = of_two_chunks("interleaved", 4, deterministic);
    recipe.steps = 3;
    const Outcome expected = train_in_stages(recipe);
    std::mutex mutex;
    std::map<std::string, at::Tensor> weights;
    run_ranks(4, [&](Rank& rank) {
      const Grid grid(rank.world(), Topology({{"pipe", 2}, {"data", 2}}));
      StageModel model = pipeline_testing::pipeline_of(recipe).build(grid.position_on("pipe"));
      std::swap(model.parameters[0], model.parameters[1]);
      InitializeOptions options{.config = pipeline_testing::config_of(recipe, 4)};
      PipelineEngine engine(rank.world(), grid.topology(), model, {.schedule = "interleaved", .chunks = 2}, options);
      const MicroBatches batches = pipeline_testing::batches_of(engine.group().rank());
      for (int step = 0; step < recipe.steps; ++step) (void)engine.train_batch(batches);
      auto mine = weights_of(engine);
      const std::lock_guard lock(mutex);
      if (engine.group().rank() == 0) weights.merge(mine);
    });
    for (const auto& [name, weight] : expected.weights) EXPECT_TRUE(at::equal(weights.at(name), weight)) << name;
  }
}

TEST(WholeGradients, MoveTheBytesOfStage1AtMost) {
  const Traffic at_1 = traffic_of(1, false), each = traffic_of(3, false), whole = traffic_of(3, true);
  EXPECT_GT(at_1.bytes, 0);
  EXPECT_LE(static_cast<double>(whole.bytes), 1.05 * static_cast<double>(at_1.bytes));
  EXPECT_LE(static_cast<double>(whole.operators), 1.05 * static_cast<double>(at_1.operators));
  EXPECT_GT(each.bytes, 2 * whole.bytes);  // what a reduction per micro-batch costs
  std::cout << "stage 1: " << at_1.bytes << " bytes, " << at_1.operators << " operators; stage 3: " << whole.bytes
            << " bytes, " << whole.operators << " operators; reduced per micro-batch: " << each.bytes << " bytes, "
            << each.operators << " operators\n";
}

TEST(WholeGradients, HaveTheBitsOfStage1) {
  for (const char* schedule : {"1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"})
    for (const bool tied : {false, true})
      for (const int zero : {2, 3})
        for (const GatherPolicy gather : {GatherPolicy::kShared, GatherPolicy::kCopy}) {
          if (zero == 2 && gather == GatherPolicy::kCopy) continue;
          SCOPED_TRACE(str(schedule, ", tied ", tied, ", ZeRO ", zero, ", copy ", gather == GatherPolicy::kCopy));
          Recipe recipe{.data = 2, .stages = 2, .schedule = schedule, .tied = tied, .steps = 3};
          recipe.configure = [](Config& config) { config.pager.stage = 1; };
          const Outcome at_1 = train_in_stages(recipe);
          recipe.configure = [=](Config& config) {
            config.pager.stage = zero;
            config.pager.gather = gather;
            config.pipeline.whole_gradients = true;
          };
          expect_close(at_1, train_in_stages(recipe), 0);
        }
}

/// Whether an engine of 2 x 2 ranks sums whole gradients, on the stage of rank 0.
bool sums_whole(const std::function<void(Config&)>& configure) {
  const Recipe recipe{.data = 2, .configure = [&](Config& config) {
                        config.pager.stage = 2;
                        config.pipeline.whole_gradients = std::nullopt;
                        configure(config);
                      }};
  std::atomic<bool> sums = false;
  run_ranks(4, [&](Rank& rank) {
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    auto engine =
        trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, rank.size())});
    if (rank.id() == 0) sums = engine.runner().sums_whole_gradients();
  });
  return sums;
}

TEST(WholeGradients, AreAutomaticWhereTheySaveBytesAndFit) {
  EXPECT_TRUE(sums_whole([](Config&) {}));
  EXPECT_TRUE(sums_whole([](Config& config) { config.pager.stage = 3; }));
  EXPECT_FALSE(sums_whole([](Config& config) { config.pager.stage = 1; }));  // one reduction as it is
  EXPECT_FALSE(sums_whole([](Config& config) { config.pager.deterministic = true; }));
  EXPECT_FALSE(sums_whole([](Config& config) { config.pipeline.whole_gradients = false; }));
  EXPECT_TRUE(WholeGradients({.kept_bytes = 30, .sum_bytes = 20, .memory_bytes = 100}).fit());
  EXPECT_FALSE(WholeGradients({.kept_bytes = 31, .sum_bytes = 20, .memory_bytes = 100}).fit());
  EXPECT_FALSE(WholeGradients({.kept_bytes = 0, .sum_bytes = 1, .memory_bytes = 0}).fit());
}

TEST(WholeGradients, CostWhatTheLayoutSays) {
  for (const auto& [zero, dtype] : {std::pair{2, at::kFloat}, {3, at::kFloat}, {2, at::kBFloat16}}) {
    SCOPED_TRACE(str("ZeRO ", zero, ", ", dtype));
    const Recipe recipe{.data = 2, .configure = [zero = zero, dtype = dtype](Config& config) {
                          config.pager.stage = zero;
                          config.precision.weight_dtype = dtype;
                        }};
    run_ranks(4, [&](Rank& rank) {
      PipelineModule module = pipeline_testing::pipeline_of(recipe);
      auto engine = trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 4)});
      int64_t numel = 0;
      for (const UnitLayout& unit : engine.pager().layout().units) numel += unit.numel();
      const WholeGradients cost = whole_gradients_of(engine.pager(), 4);
      EXPECT_EQ(cost.sum_bytes, 4 * numel);
      const bool is_fp32 = dtype == at::kFloat;
      EXPECT_EQ(cost.kept_bytes, numel * (is_fp32 ? 4 : 2) / (zero == 3 ? 2 : 1) + numel / 2 * (is_fp32 ? 8 : 12));
      EXPECT_EQ(cost.memory_bytes, total_memory(at::kCPU) / 4);
    });
  }
}

/// One reduction of each unit in a step, at the default.
TEST(WholeGradients, AutomaticOnesAreReducedOnce) {
  Recipe recipe = of_two_chunks("interleaved", 4, false);
  recipe.configure = [](Config& config) {
    config.pager.stage = 2;
    config.pipeline.whole_gradients = std::nullopt;
  };
  const Sent sent = sent_by(recipe);
  EXPECT_EQ(sent.reductions, sent.units);
}

TEST(SeveralEngines, SteppingInTurnHaveTheBitsOfEachAlone) {
  Recipe first{.data = 2, .stages = 2, .steps = 3, .configure = [](Config& config) { config.pager.stage = 3; }};
  Recipe second{.data = 2, .stages = 2, .schedule = "zb-v", .tied = true, .steps = 3, .configure = [](Config& config) {
                  config.pager.stage = 2;
                }};
  const Outcome first_alone = train_in_stages(first), second_alone = train_in_stages(second);
  run_ranks(4, [&](Rank& rank) {
    PipelineModule modules[] = {pipeline_testing::pipeline_of(first), pipeline_testing::pipeline_of(second)};
    auto one = trireme::initialize(rank.world(), modules[0], {.config = pipeline_testing::config_of(first, 4)});
    auto other = trireme::initialize(rank.world(), modules[1], {.config = pipeline_testing::config_of(second, 4)});
    const MicroBatches of_one = pipeline_testing::batches_of(one.group().rank());
    const MicroBatches of_other = pipeline_testing::batches_of(other.group().rank());
    for (int step = 0; step < first.steps; ++step) {
      EXPECT_EQ(one.train_batch(of_one).item<float>(), first_alone.losses[step]);
      EXPECT_EQ(other.train_batch(of_other).item<float>(), second_alone.losses[step]);
    }
    for (const auto& [name, weight] : weights_of(one)) EXPECT_TRUE(at::equal(weight, first_alone.weights.at(name)));
    for (const auto& [name, weight] : weights_of(other)) EXPECT_TRUE(at::equal(weight, second_alone.weights.at(name)));
  });
}

TEST(ShardedInit, HasTheBitsOfWholeConstruction) {
  for (const bool tied : {false, true})
    for (const int zero : {0, 3}) {
      SCOPED_TRACE(str("tied ", tied, ", ZeRO ", zero));
      Recipe recipe{.data = 2, .stages = 2, .tied = tied, .steps = 3, .configure = [&](Config& config) {
                      config.pager.stage = zero;
                    }};
      const Outcome whole = train_in_stages(recipe);
      recipe.sharded_init = true;
      expect_close(whole, train_in_stages(recipe), 0);
    }
}

TEST(ShardedInit, AnotherScopeIsRefused) {
  run_ranks(2, [](Rank& rank) {
    PipelineModule module = pipeline_testing::pipeline_of({.stages = 2});
    const zero::Init init(rank.world());
    const std::string error = error_of<ConfigError>([&] { (void)trireme::initialize(rank.world(), module); });
    EXPECT_NE(error.find("set PipelineModuleOptions::sharded_init"), std::string::npos) << error;
  });
}

/// Trains with `stages`, from a checkpoint where one lies in `directory`, and saves there.
Outcome train_and_save(const Recipe& recipe, const std::filesystem::path& directory, int from_step) {
  Outcome outcome;
  std::mutex mutex;
  run_ranks(recipe.data * recipe.stages, [&](Rank& rank) {
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    auto engine =
        trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, rank.size())});
    if (from_step > 0) {
      EXPECT_TRUE(engine.load_checkpoint(directory));
      EXPECT_EQ(engine.global_steps(), from_step);
    }
    const MicroBatches all = pipeline_testing::batches_of(engine.group().rank());
    for (int i = 0; i < from_step * recipe.micro_batches; ++i) (void)all();
    for (int step = 0; step < recipe.steps; ++step) {
      const float loss = engine.train_batch(all).item<float>();
      if (rank.id() == 0) outcome.losses.push_back(loss);
    }
    engine.save_checkpoint(directory);
    engine.save_16bit_model(directory);
    auto weights = weights_of(engine);
    const std::lock_guard lock(mutex);
    if (engine.group().rank() == 0) outcome.weights.merge(weights);
  });
  return outcome;
}

TEST(Checkpoints, LoadAtOtherNumbersOfStagesRanksAndSchedules) {
  for (const bool tied : {false, true}) {
    const auto configure = [](int zero) {
      return [zero](Config& config) {
        config.pager.stage = zero;
        config.pager.deterministic = true;
        config.scheduler = LrScheduleOptions{};
      };
    };
    const Outcome expected = train_whole({.tied = tied, .steps = 6, .configure = configure(0)});
    const TemporaryFolder folder;
    train_and_save({.stages = 2, .schedule = "zb-h1", .tied = tied, .steps = 2, .configure = configure(3)},
                   folder.path(), 0);
    train_and_save({.stages = 4, .schedule = "1f1b", .tied = tied, .steps = 2, .configure = configure(1)},
                   folder.path(), 2);
    Outcome got =
        train_and_save({.stages = 2, .schedule = "interleaved", .tied = tied, .steps = 2, .configure = configure(2)},
                       folder.path(), 4);
    got.losses.insert(got.losses.begin(), expected.losses.begin(), expected.losses.begin() + 4);
    expect_close(expected, got, 0);

    // Into a model without stages: six steps are behind it, and a seventh has the bits of seven.
    const Outcome seven = train_whole({.tied = tied, .steps = 7, .configure = configure(0)});
    run_ranks(1, [&](Rank& rank) {
      const Recipe recipe{.tied = tied, .configure = configure(2)};
      pipeline_testing::Whole module(pipeline_testing::layers_of(recipe));
      auto engine = trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 1)});
      ASSERT_TRUE(engine.load_checkpoint(folder.path()));
      for (int i = 0; i < 4; ++i) {
        const at::Tensor tokens = pipeline_testing::tokens_of(0, 24 + i);
        engine.backward(pipeline_testing::loss_of(engine.forward(tokens.narrow(1, 0, 3)), tokens.narrow(1, 1, 3)));
        engine.step();
      }
      for (const auto& [name, weight] : weights_of(engine))
        EXPECT_TRUE(at::equal(weight, seven.weights.at(name))) << name;
    });
  }
}

TEST(FrozenLayers, OfAWholeStageTrainTheOthers) {
  const auto frozen = [](std::vector<LayerSpec> layers, size_t from, size_t to) {
    for (size_t i = from; i < to; ++i)
      layers[i].make = [make = layers[i].make] {
        auto module = make();
        for (at::Tensor& parameter : module->parameters()) parameter.set_requires_grad(false);
        return module;
      };
    return layers;
  };
  for (const auto& [from, to] : {std::pair{0, 4}, std::pair{4, 8}, std::pair{2, 6}})
    for (const char* schedule : {"1f1b", "zb-h1", "zb-v"})
      for (const int zero : {2, 3}) {
        SCOPED_TRACE(str(schedule, ", frozen ", from, " to ", to, ", ZeRO ", zero));
        expect_same(
            {.stages = 2,
             .schedule = schedule,
             .steps = 1,
             .configure = [&](Config& config) { config.pager.stage = zero; },
             .change_layers = [&](std::vector<LayerSpec> layers) { return frozen(std::move(layers), from, to); }});
      }
}

TEST(FrozenLayers, LeftOutOfACheckpointStayWhatTheyAre) {
  const auto freeze_first = [](std::vector<LayerSpec> layers) {
    layers[0].make = [make = layers[0].make] {
      auto module = make();
      for (at::Tensor& parameter : module->parameters()) parameter.set_requires_grad(false);
      return module;
    };
    return layers;
  };
  for (const int zero : {1, 3}) {
    const TemporaryFolder folder;
    run_ranks(4, [&](Rank& rank) {
      const Recipe recipe{.data = 2,
                          .stages = 2,
                          .configure = [&](Config& config) { config.pager.stage = zero; },
                          .change_layers = freeze_first};
      PipelineModule module = pipeline_testing::pipeline_of(recipe);
      auto engine = trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 4)});
      const MicroBatches batches = pipeline_testing::batches_of(engine.group().rank());
      (void)engine.train_batch(batches);
      engine.save_checkpoint(folder.path(), {.exclude_frozen_parameters = true});
      const auto saved = weights_of(engine);
      (void)engine.train_batch(batches);
      ASSERT_TRUE(engine.load_checkpoint(folder.path()));
      for (const auto& [name, weight] : weights_of(engine)) EXPECT_TRUE(at::equal(weight, saved.at(name))) << name;
    });
  }
}

TEST(Dropout, DeterministicDrawsTheNumbersOfTheModelWithoutStages) {
  const auto with_dropout = [](std::vector<LayerSpec> layers) {
    for (const size_t i : {2, 5}) layers[i] = layer_of([](const at::Tensor& x) { return at::dropout(x, 0.3, true); });
    return layers;
  };
  for (const char* schedule : {"1f1b", "interleaved", "zb-v"})
    for (const int recomputed : {0, 2})
      expect_same({.data = 2,
                   .stages = 2,
                   .schedule = schedule,
                   .steps = 3,
                   .recomputed_layers = recomputed,
                   .configure = [](Config& config) { config.pager.deterministic = true; },
                   .change_layers = with_dropout});
}

TEST(Values, OfAnyNestingPassBetweenStages) {
  const auto nested = [](std::vector<LayerSpec> layers) {
    layers[2] = layer_of([](const at::Tensor& x) {
      c10::Dict<std::string, at::Tensor> dict;
      dict.insert("x", x);
      dict.insert("mask", x.detach() > 0);
      return std::make_tuple(dict, x * 2, std::optional<int64_t>(), int64_t{3});
    });
    layers[5] = layer_of([](const c10::IValue& value) {
      const auto& tuple = value.toTupleRef().elements();
      const auto dict = tuple[0].toGenericDict();
      EXPECT_TRUE(tuple[2].isNone());
      EXPECT_EQ(tuple[3].toInt(), 3);
      const at::Tensor x = dict.at("x").toTensor();
      return at::where(dict.at("mask").toTensor(), x, tuple[1].toTensor() * 0.1);
    });
    for (const size_t i : {3, 4}) layers[i] = layer_of([](const c10::IValue& value) { return value; });
    return layers;
  };
  for (const char* schedule : {"1f1b", "zb-h1"})
    expect_same({.stages = 2, .schedule = schedule, .steps = 3, .change_layers = nested});
}

TEST(Evaluation, GivesTheLossOfTheModelWithoutStages) {
  for (const char* schedule : {"1f1b", "interleaved", "zb-v"}) {
    const Recipe recipe{.data = 2, .stages = 2, .schedule = schedule};
    run_ranks(4, [&](Rank& rank) {
      PipelineModule module = pipeline_testing::pipeline_of(recipe);
      auto engine = trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 4)});
      const EvalResult result = engine.eval_batch(pipeline_testing::batches_of(engine.group().rank()),
                                                  {.micro_batches = 3, .returns_outputs = true});
      pipeline_testing::Whole whole(pipeline_testing::layers_of(recipe));
      double expected = 0;
      for (int data = 0; data < 2; ++data)
        for (int i = 0; i < 3; ++i) {
          const at::Tensor tokens = pipeline_testing::tokens_of(data, i);
          const at::Tensor logits = whole.forward(tokens.narrow(1, 0, 3));
          expected += pipeline_testing::loss_of(logits, tokens.narrow(1, 1, 3)).item<double>() / 6;
        }
      EXPECT_NEAR(result.loss.item<float>(), expected, 1e-6);
      const bool has_last = std::string(schedule) == "zb-v" ? engine.is_first_stage() : engine.is_last_stage();
      EXPECT_EQ(result.outputs.size(), has_last ? 3 : 0);
      EXPECT_GT(engine.train_batch(pipeline_testing::batches_of(0)).item<float>(), 0);  // and trains on
    });
  }
}

TEST(Buffers, AreThoseOfTheScheduleAndNotMore) {
  const Outcome outcome = train_in_stages({.stages = 4, .micro_batches = 8, .steps = 2});
  EXPECT_EQ(outcome.counters.peak_buffers, std::vector<int>{pipeline::one_f_one_b(4, 8).buffers[0][0]});
}

TEST(PipelineErrors, NameWhatIsWrongBeforeAnythingChanges) {
  const Recipe recipe{.stages = 2};
  const auto of = [&](const std::function<void(PipelineEngine&)>& call) {
    return error_of<Error>([&] {
      run_ranks(2, [&](Rank& rank) {
        PipelineModule module = pipeline_testing::pipeline_of(recipe);
        auto engine = trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 2)});
        call(engine);
      });
    });
  };
  EXPECT_SAYS(
      of([](PipelineEngine& engine) {
        engine.train_batch([n = 0]() mutable { return n++ < 3 ? pipeline_testing::batches_of(0)() : std::nullopt; });
      }),
      "train_batch: the data ended after 3 of 4 micro-batches");
  const auto longer = [n = 0]() mutable {
    const int64_t length = n++ < 2 ? 3 : 2;
    const at::Tensor tokens = pipeline_testing::tokens_of(0, n);
    return std::optional(MicroBatch{tokens.narrow(1, 0, length), tokens.narrow(1, 1, length)});
  };
  EXPECT_SAYS(of([&](PipelineEngine& engine) { engine.train_batch(longer); }),
              "stage 0 sent stage 1 values of Float [2, 3, 8] before, and now of Float [2, 2, 8]; set dynamic_shape");
  EXPECT_SAYS(error_of<ConfigError>([&] {
                run_ranks(3, [&](Rank& rank) {
                  PipelineModule module = pipeline_testing::pipeline_of(recipe);
                  PipelineEngine engine(rank.world(), module, {.config = pipeline_testing::config_of({}, 3)});
                });
              }),
              "stages=2 does not divide the 3 ranks");
  const std::string text = error_of<Error>([&] {
    Recipe broken = recipe;
    broken.change_layers = [](std::vector<LayerSpec> layers) {
      layers[6] = layer_of([](const at::Tensor&) -> at::Tensor { throw DataError("a layer of the user's"); });
      return layers;
    };
    train_in_stages(broken);
  });
  EXPECT_SAYS(text, "a layer of the user's");
}

TEST(PipelineErrors, NameAStageWithoutAModule) {
  run_ranks(2, [](Rank& rank) {
    StageModel model;
    model.parts = {[](c10::IValue value) { return value; }};
    const Topology topology({{"pipe", 2}, {"data", 1}});
    EXPECT_SAYS(error_of<ConfigError>([&] { const PipelineEngine engine(rank.world(), topology, model, {}); }),
                "StageModel: `module` is null; give one");
  });
}

TEST(PipelineErrors, NameTheInstructionThatWaitsForAStageThatHangs) {
  Recipe recipe{.stages = 2};
  recipe.change_layers = [](std::vector<LayerSpec> layers) {
    layers[6] = layer_of([](const at::Tensor& x) {
      std::this_thread::sleep_for(std::chrono::seconds(3));
      return x;
    });
    return layers;
  };
  const std::string text = error_of<CommError>([&] {
    run_ranks(2,
              [&](Rank& rank) {
                PipelineModule module = pipeline_testing::pipeline_of(recipe);
                auto engine = trireme::initialize(rank.world(), module,
                                                  {.config = pipeline_testing::config_of(recipe, rank.size())});
                (void)engine.train_batch(pipeline_testing::batches_of(0));
              },
              {.timeout = std::chrono::seconds(1)});
  });
  EXPECT_SAYS(text, "of stage 0, RecvGrad, micro-batch 0 in train_batch");
}

}  // namespace
}  // namespace trireme
