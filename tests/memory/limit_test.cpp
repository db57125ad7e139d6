// A model whose states do not fit into a rank's address space trains at ZeRO stage 3 on four ranks, or on one with
// weights and states on disk, and cannot otherwise.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <fstream>

#include "tests/support/processes.h"
#include "tests/support/temporary_folder.h"
#include "trireme/engine/model_engine.h"
#include "trireme/intercept.h"
#include "trireme/pager/init/init.h"

namespace trireme {
namespace {

constexpr int64_t kWidth = 768;
constexpr int kLayers = 48;
// 28.3 M parameters: 453 MB of fp32 states, 113 MB on each of four ranks.
constexpr size_t kStateBytes = size_t{16} * kLayers * kWidth * (kWidth + 1);
// Room above start-up: less than two thirds of the whole states, and more than twice a quarter of them, for a few whole
// layers, gradients on their way and the address space that glibc reserves for a thread's heap.
constexpr size_t kRoomBytes = size_t{280} << 20;
static_assert(kRoomBytes < kStateBytes * 2 / 3 && kRoomBytes > kStateBytes / 2);

struct DeepNet : torch::nn::Module {
  DeepNet() : layers(register_module("layers", torch::nn::Sequential())) {
    for (int i = 0; i < kLayers; ++i) {
      layers->push_back(torch::nn::Linear(kWidth, kWidth));
      layers->push_back(torch::nn::Tanh());
    }
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x).square().mean(); }
  torch::nn::Sequential layers;
};

size_t address_space_bytes() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

// Loads what the first steps load (kernels, thread pools), so that the limit counts the model alone.
void warm_up() {
  torch::nn::Linear layer(8, 8);
  layer->forward(at::ones({2, 8})).sum().backward();
}

/// `place`: the ZeRO stage, with "disk" behind it where weights and states are on disk.
int train(Group& world, const std::string& place) {
  at::set_num_threads(1);
  mallopt(M_ARENA_MAX, 1);
  warm_up();
  world.barrier();
  const rlimit limit{address_space_bytes() + kRoomBytes, RLIM_INFINITY};
  if (setrlimit(RLIMIT_AS, &limit) != 0) return 3;

  manual_seed(1);
  std::unique_ptr<DeepNet> net;
  {
    zero::Init scope(world, {.live_bytes = 8 << 20});
    net = std::make_unique<DeepNet>();
  }
  Config config = default_config(world.size());
  config.optimizer = OptimizerOptions{};
  config.pager.stage = place == "0" ? 0 : 3;
  const testing::TemporaryFolder folder;
  if (place == "3 disk") {
    config.pager.disk = {.folder = folder.path().string(), .buffers = 3};
    config.disk = {.folder = folder.path().string(), .buffers = 2};
  }
  config.pager.gather = GatherPolicy::kCopy;
  config.pager.live_bytes = 16 << 20;
  config.pager.prefetch_bytes = 4 << 20;
  ModelEngine<DeepNet> engine(world, *net, {.config = config});
  double first = 0, last = 0;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = engine(at::ones({2, kWidth}));
    engine.backward(loss);
    engine.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  return last < first ? 0 : 4;
}

TEST(Memory, AModelThatDoesNotFitOnOneRankTrainsAtStage3OnFour) {
  for (const ProcessResult& rank : run_processes(4, train, {.argument = "3"}))
    EXPECT_EQ(rank.exit_code, 0) << rank.error_text;
}

TEST(Memory, TheSameModelRunsOutOfMemoryAtStage0) {
  bool out_of_memory = false;
  for (const ProcessResult& rank : run_processes(4, train, {.argument = "0"})) {
    EXPECT_NE(rank.exit_code, 0);
    out_of_memory |=
        rank.error_text.find("allocate") != std::string::npos || rank.error_text.find("bad_alloc") != std::string::npos;
  }
  EXPECT_TRUE(out_of_memory);
}

// One rank: gradients and a few units are in memory, a quarter of the states and a little.
TEST(Memory, TheSameModelTrainsOnOneRankWithWeightsAndStatesOnDisk) {
  const ProcessResult rank = run_processes(1, train, {.argument = "3 disk"}).front();
  EXPECT_EQ(rank.exit_code, 0) << rank.error_text;
}

TEST(Memory, TheSameModelRunsOutOfMemoryOnOneRankWithoutADisk) {
  EXPECT_NE(run_processes(1, train, {.argument = "3"}).front().exit_code, 0);
}

}  // namespace
}  // namespace trireme
