// Axes in twos and threes, at every ZeRO stage: losses, norms, every gradient before clipping and the trained weights
// are those of one process with plain libtorch, up to the rounding of sums in another order.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/compose/compare.h"
#include "tests/compose/plain.h"
#include "tests/compose/scenario.h"

namespace trireme::compose {
namespace {

/// The axes along which ranks stand beside two that are data-parallel.
struct Axes {
  std::string name;
  bool has_replicas = false;  ///< two, each of two shards
  std::string schedule = {};
  std::string attention = {};  ///< of parts of sequences; empty: whole sequences
  bool has_slices = false;
};

const std::vector<Axes>& all_axes() {
  static const std::vector<Axes> all = {
      {.name = "DataPipe", .schedule = "1f1b"},
      {.name = "DataSequence", .attention = "ulysses"},
      {.name = "DataTensor", .has_slices = true},
      {.name = "DataPipeTensor", .schedule = "1f1b", .has_slices = true},
      {.name = "DataSequenceTensor", .attention = "ulysses", .has_slices = true},
      {.name = "DataSequenceTensorInARing", .attention = "ring", .has_slices = true},
      {.name = "DataPipeSequenceTensor", .schedule = "1f1b", .attention = "ulysses", .has_slices = true},
      {.name = "DataPipeSequenceTensorInAV", .schedule = "zb-v", .attention = "ring", .has_slices = true},
      {.name = "ReplicasSequenceTensor", .has_replicas = true, .attention = "ulysses", .has_slices = true},
      {.name = "ReplicasPipe", .has_replicas = true, .schedule = "1f1b"},
      {.name = "ReplicasPipeInAV", .has_replicas = true, .schedule = "zb-v"},
      {.name = "ReplicasSequence", .has_replicas = true, .attention = "ulysses"},
      {.name = "ReplicasSequenceInARing", .has_replicas = true, .attention = "ring"},
      {.name = "ReplicasTensor", .has_replicas = true, .has_slices = true},
      {.name = "ReplicasPipeTensor", .has_replicas = true, .schedule = "1f1b", .has_slices = true},
  };
  return all;
}

struct Layout {
  Axes axes;
  int stage = 0;  ///< ZeRO's
  std::string gather = "auto";
};

/// ZeRO 0 to 3, and 1 to 3 with replicas; at 3 by each way to gather.
std::vector<Layout> all_layouts() {
  std::vector<Layout> all;
  for (const Axes& axes : all_axes()) {
    for (int stage = axes.has_replicas ? 1 : 0; stage < 3; ++stage) all.push_back({axes, stage});
    for (const char* gather : {"shared", "copy"}) all.push_back({axes, 3, gather});
  }
  return all;
}

std::vector<Layout> some_layouts() {
  std::vector<Layout> some;
  for (const Axes& axes : all_axes()) some.push_back({axes, 3, "copy"});
  return some;
}

Scenario scenario_of(const Layout& layout) {
  Scenario scenario;
  Json& zero = scenario.config["zero_optimization"] = {{"stage", layout.stage}};
  if (layout.axes.has_replicas) {
    scenario.data = 4;
    zero["mics_shard_size"] = 2;
  }
  scenario.config["trireme"]["gather"] = layout.gather;
  scenario.schedule = layout.axes.schedule;
  scenario.has_slices = layout.axes.has_slices;
  if (!layout.axes.attention.empty()) {
    scenario.has_sequence_parts = true;
    scenario.config["trireme"]["sequence_attention"] = layout.axes.attention;
  }
  return scenario;
}

class AxesTogether : public ::testing::TestWithParam<Layout> {};

// Relative to one process's: a gradient and a weight to its norm. Behind each bound stands the largest that a layout
// has reached, with AdamW. Gradients are sums of a hundred products and more in another order: below 7.5e-7 over up to
// three axes, above 1e-6 where stages, sequences and slices meet on two data-parallel ranks.
TEST_P(AxesTogether, TrainAsOneProcess) {
  const Scenario scenario = scenario_of(GetParam());
  const Distances found = distances(train(scenario), train_plainly(scenario));
  EXPECT_LE(found.losses, 2.5e-7);   // 1.2e-7
  EXPECT_LE(found.norms, 1.5e-7);    // 6.9e-8
  EXPECT_LE(found.gradients, 2e-6);  // 1.05e-6
  EXPECT_LE(found.weights, 1.2e-7);  // 5.6e-8
}

const auto kNameOfLayout = [](const auto& info) {
  const Layout& layout = info.param;
  return str(layout.axes.name, "AtZero", layout.stage, layout.stage == 3 ? layout.gather : "");
};
INSTANTIATE_TEST_SUITE_P(Some, AxesTogether, ::testing::ValuesIn(some_layouts()), kNameOfLayout);
INSTANTIATE_TEST_SUITE_P(Slow, AxesTogether, ::testing::ValuesIn(all_layouts()), kNameOfLayout);

}  // namespace
}  // namespace trireme::compose
