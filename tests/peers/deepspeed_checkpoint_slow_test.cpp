// Checkpoints go both ways between DeepSpeed and Trireme, and training continues as if nothing had happened.
//
// DeepSpeed itself runs here, from PyPI, in a virtual environment of its own in the build folder. The net, the data and
// the configuration are those of deepspeed_run.py: tied, frozen and trained parameters in two groups, buffers, a
// schedule.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/engine/dot.h"
#include "tests/support/run_ranks.h"

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using testing::TemporaryFolder;
using Path = std::filesystem::path;

struct TiedLinear : torch::nn::Module {
  explicit TiedLinear(const at::Tensor& shared)
      : weight(register_parameter("weight", shared)), bias(register_parameter("bias", at::zeros({7}))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::nn::functional::linear(x, weight, bias); }
  at::Tensor weight, bias;
};

struct Net : torch::nn::Module {
  Net() {
    embed = register_module("embed", torch::nn::Linear(5, 7));
    mid = register_module("mid", torch::nn::Linear(7, 7));
    frozen = register_module("frozen", torch::nn::Linear(torch::nn::LinearOptions(7, 7).bias(false)));
    out = register_module("out", torch::nn::Linear(7, 3));
    tied = register_module("tied", std::make_shared<TiedLinear>(mid->weight));
    frozen->weight.set_requires_grad(false);
    scale = register_buffer("scale", at::full({3}, 1.5));
    count = register_buffer("count", at::full({}, 7, at::kLong));
  }
  at::Tensor forward(at::Tensor x) {
    x = embed->forward(x).tanh();
    x = mid->forward(x).tanh();
    x = frozen->forward(x).tanh();
    x = tied->forward(x).tanh();
    return out->forward(x) * scale.to(x.scalar_type());
  }
  torch::nn::Linear embed{nullptr}, mid{nullptr}, frozen{nullptr}, out{nullptr};
  std::shared_ptr<TiedLinear> tied;
  at::Tensor scale, count;
};

/// Rank `rank`'s samples of a step; exact in bf16.
at::Tensor batch_of(int step, int rank) {
  const at::Tensor i = at::arange(4).view({4, 1});
  const at::Tensor j = at::arange(5).view({1, 5});
  return i.mul(7).add(j.mul(3)).add(step * 5 + rank * 11).remainder(13).sub(6).to(at::kFloat).div(8);
}

struct Case {
  int stage;
  const char* dtype;
};

void PrintTo(const Case& tested, std::ostream* out) { *out << "stage " << tested.stage << ", " << tested.dtype; }

Json config_of(const Case& tested) {
  return {{"train_micro_batch_size_per_gpu", 4},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-2}, {"weight_decay", 0.1}, {"torch_adam", true}}}}},
          {"scheduler", {{"type", "WarmupLR"}, {"params", {{"warmup_max_lr", 1e-2}, {"warmup_num_steps", 10}}}}},
          {"bf16", {{"enabled", std::string(tested.dtype) == "bf16"}}},
          {"data_types", {{"buffer_dtype", "fp32"}}},
          {"zero_optimization", {{"stage", tested.stage}, {"sub_group_size", 60}}}};
}

/// The program's PREFIX/lib/pythonX/site-packages/torch/lib/libtorch_cpu.so belongs to PREFIX/bin/python3.
Path python_of_torch() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&at::_ops::equal::call), &info);
  Path prefix = info.dli_fname;
  for (int i = 0; i < 6; ++i) prefix = prefix.parent_path();
  return prefix / "bin" / "python3";
}

Path here() { return Path(__FILE__).parent_path(); }
Path program() { return std::getenv("TRIREME_PROGRAM"); }
constexpr char kDeepSpeed[] = "deepspeed==0.19.8";

Path environments() { return program().parent_path().parent_path() / "peers"; }

int run(const std::vector<std::string>& words) {
  std::string command;
  for (const std::string& word : words) command += "'" + word + "' ";
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int run_deepspeed(const std::vector<std::string>& arguments) {
  std::vector<std::string> words{environments() / "deepspeed-0.19.8" / "bin" / "python", "-W", "ignore",
                                 here() / "deepspeed_run.py"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run(words);
}

class DeepSpeedCheckpoint : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    ASSERT_NE(std::getenv("TRIREME_PROGRAM"), nullptr) << "ctest sets it";
    const int made = run({python_of_torch(), here() / "environments.py", environments(), kDeepSpeed});
    if (made == 77) GTEST_SKIP() << "PyPI cannot be reached, so there is no DeepSpeed to compare with";
    ASSERT_EQ(made, 0);
    std::ofstream(folder_.path() / "ds_config.json") << config_of(GetParam());
  }

  std::string path(const char* name) const { return folder_.path() / name; }
  std::string stage() const { return std::to_string(GetParam().stage); }

  std::vector<double> deepspeeds_losses(const char* name) const {
    return read_json(folder_.path() / name / "losses.json").get<std::vector<double>>();
  }

  /// One rank's kernels sum eight samples where two ranks' sum four each and then add: in bf16 that is another
  /// rounding.
  double tolerance_after_a_step(int ranks) const {
    return ranks == 1 && std::string(GetParam().dtype) == "bf16" ? 1e-4 : 1e-5;
  }

  /// Steps `first` and `first` + 1 of an engine on `ranks` ranks, which share the batch of two.
  struct Run {
    int first = 0;
    int count = 2;
    std::string load = {};
    std::string save = {};
    int ranks = 2;
  };
  std::vector<double> losses_of(const Run& run) const {
    std::vector<double> losses;
    Json config = config_of(GetParam());
    config["train_micro_batch_size_per_gpu"] = 8 / run.ranks;
    run_ranks(run.ranks, [&](Rank& rank) {
      torch::manual_seed(1);
      auto net = std::make_shared<Net>();
      auto engine = initialize(rank.world(), *net,
                               {.config = config_from_json(config, run.ranks),
                                .parameter_groups = {{.patterns = {"bias"}, .weight_decay = 0.0}}});
      if (!run.load.empty()) {
        const auto loaded = engine.load_checkpoint(run.load);
        ASSERT_TRUE(loaded);
        EXPECT_EQ(Json::parse(loaded->client_state), (Json{{"epoch", 3}}));
        EXPECT_EQ(engine.global_steps(), 3);
      }
      for (int step = run.first; step < run.first + run.count; ++step) {
        if (step == 3 && !run.save.empty()) engine.save_checkpoint(run.save, {.client_state = R"({"epoch": 3})"});
        at::Tensor input = run.ranks == 2 ? batch_of(step, rank.id()) : at::cat({batch_of(step, 0), batch_of(step, 1)});
        if (std::string(GetParam().dtype) == "bf16") input = input.to(at::kBFloat16);
        at::Tensor loss = engine(input).to(at::kFloat).square().mean();
        engine.backward(loss);
        engine.step();
        at::Tensor mean = loss.detach().clone().view({1});
        rank.world().all_reduce(mean).wait();
        if (rank.id() == 0 && step >= 3) losses.push_back(mean.item<double>() / run.ranks);
      }
    });
    return losses;
  }

  static void expect_close(const std::vector<double>& found, const std::vector<double>& expected, double second) {
    ASSERT_EQ(found.size(), 2U);
    ASSERT_EQ(expected.size(), 2U);
    EXPECT_NEAR(found[0] / expected[0], 1, 1e-5);
    EXPECT_NEAR(found[1] / expected[1], 1, second);
    EXPECT_GT(std::abs(expected[1] / expected[0] - 1), 5e-3);  // the step between them shows
  }

 private:
  const TemporaryFolder folder_;
};

TEST_P(DeepSpeedCheckpoint, OfDeepSpeedContinuesHereAtAnyNumberOfRanksWithTheSameLoss) {
  ASSERT_EQ(run_deepspeed({"train", path("theirs"), stage(), GetParam().dtype}), 0);
  ASSERT_EQ(run({program(), "convert", path("theirs"), path("ours"), "--to", "trireme"}), 0);
  for (const int ranks : {2, 1}) {
    SCOPED_TRACE(ranks);
    expect_close(losses_of({.first = 3, .load = path("ours"), .ranks = ranks}), deepspeeds_losses("theirs"),
                 tolerance_after_a_step(ranks));
  }
}

TEST_P(DeepSpeedCheckpoint, OfOursContinuesInDeepSpeedWithTheSameLossAndTheSameWeights) {
  const std::vector<double> expected = losses_of({.first = 0, .count = 5, .save = path("ours")});
  ASSERT_EQ(run({program(), "convert", path("ours"), path("theirs"), "--to", "deepspeed", "--stage", stage(), "--ranks",
                 "2"}),
            0);
  ASSERT_EQ(run_deepspeed({"compare", path("theirs"), path("ours") + "/global_step3"}), 0);
  ASSERT_EQ(run_deepspeed({"resume", path("theirs"), stage(), GetParam().dtype}), 0);
  expect_close(deepspeeds_losses("theirs"), expected, tolerance_after_a_step(2));
}

INSTANTIATE_TEST_SUITE_P(Stages, DeepSpeedCheckpoint,
                         ::testing::Values(Case{1, "fp32"}, Case{2, "fp32"}, Case{3, "fp32"}, Case{1, "bf16"},
                                           Case{2, "bf16"}, Case{3, "bf16"}),
                         [](const auto& info) { return str("Stage", info.param.stage, "In", info.param.dtype); });

}  // namespace
}  // namespace trireme
