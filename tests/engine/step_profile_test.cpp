// The report of a step's FLOPs, of a C++ program: by closed forms, at each ZeRO stage, and the losses that there are
// without it.
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/support/captured_log.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/file.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int64_t kAccumulation = 3;

/// The losses of rank 0 in three steps of a model of 4 -> 6 -> 2 features, two samples at a time.
std::vector<double> train(int ranks, const Config& config) {
  std::vector<double> losses;
  run_ranks(ranks, [&](Rank& rank) {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::ReLU(), torch::nn::Linear(6, 2));
    auto engine = initialize(rank.world(), net, {.config = config});
    for (int64_t micro_batch = 0; micro_batch < 3 * kAccumulation; ++micro_batch) {
      const at::Tensor loss = engine(torch::full({2, 4}, 0.1 * static_cast<double>(micro_batch))).square().mean();
      engine.backward(loss);
      engine.step();
      if (rank.id() == 0) losses.push_back(loss.item<double>());
    }
    engine.destroy();
  });
  return losses;
}

Config profiling(int ranks, int stage, const std::filesystem::path& output) {
  Config config = sgd_config(ranks, kAccumulation);
  config.batch = {2 * kAccumulation * ranks, 2, kAccumulation};
  config.pager.stage = stage;
  config.flops_profiler = {.enabled = true, .profile_step = 1, .top_modules = 2, .output_file = output.string()};
  return config;
}

TEST(StepProfile, ReportsTheWorkOfAStepByModuleAndTrainsAsWithout) {
  for (const int stage : {0, 3}) {
    const TemporaryFolder folder;
    const std::filesystem::path file = folder / "profile.txt";
    Config config = profiling(2, stage, file);
    const std::vector<double> profiled = train(2, config);
    config.flops_profiler = {};
    EXPECT_EQ(profiled, train(2, config));
    const std::string text = posix_file_system().read(file);
    const auto has = [&](const std::string& part) { EXPECT_NE(text.find(part), std::string::npos) << part << text; };
    has("FLOPs profile at step 1\n");
    has("in all 3 micro-batches");
    // 6 samples: products of 24 and 12 multiply-adds, of which the first one's input needs no gradient.
    has("forward:                                    432 FLOP\n");
    has("backward, recomputation included:           576 FLOP\n");
    has("parameters:                                 44\n");
    has("backward latency:");
    has("depth 0:\n    parameters  torch::nn::SequentialImpl 44\n");
    has("    forward     torch::nn::LinearImpl 432 FLOP, torch::nn::ReLUImpl 0 FLOP\n");
    has("(the model) torch::nn::SequentialImpl: 44 = 100.0%, 432 FLOP = 100.0%, 576 FLOP,");
    has("  0 torch::nn::LinearImpl: 30 = 68.2%, 288 FLOP = 66.7%, 288 FLOP,");
    has("  2 torch::nn::LinearImpl: 14 = 31.8%, 144 FLOP = 33.3%, 288 FLOP,");
  }
}

TEST(StepProfile, IsLoggedWhereNoFileCanBeWritten) {
  const TemporaryFolder folder;
  write_file_atomically(posix_file_system(), folder / "file", "no folder");
  CapturedLog log;
  (void)train(1, profiling(1, 1, folder / "file" / "profile.txt"));
  EXPECT_NE(log.text().find("warning `flops_profiler.output_file`: the report is in the log"), std::string::npos);
  EXPECT_NE(log.text().find("info FLOPs profile at step 1\n"), std::string::npos) << log.text();
}

}  // namespace
}  // namespace trireme
