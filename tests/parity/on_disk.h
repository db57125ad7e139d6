// Helpers of the tests of states and of weights on disk: models, optimizers, precisions, and a disk that fails.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/run_ranks.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/device/disk.h"
#include "trireme/engine/model_engine.h"

namespace trireme::testing {

constexpr int kDiskSteps = 6;

using ByName = std::map<std::string, at::Tensor>;

/// A layer has several blocks, the last of which is not full.
inline TrainedModel make_wide() {
  auto net = torch::nn::Sequential(torch::nn::Linear(60, 190), torch::nn::Linear(190, 60));
  draw_weights(*net);
  return {net.ptr(), [net](const MicroBatch& batch) mutable {
            return net->forward(input_of(*net, batch, {3, 60})).square().mean();
          }};
}

inline const std::vector<ModelCase> kDiskModels = {{"Wide", make_wide}, {"Llama", make_llama}};

inline const std::map<std::string, OptimizerOptions> kOptimizers = {
    {"Adam", {.kind = OptimizerKind::kAdam, .lr = 2e-3, .weight_decay = 0.05}},
    {"AdamW", {.kind = OptimizerKind::kAdamW, .lr = 2e-3, .weight_decay = 0.05}},
    {"Adagrad", {.kind = OptimizerKind::kAdagrad, .lr = 1e-2}},
    {"Lion", {.kind = OptimizerKind::kLion, .lr = 1e-3}},
    {"Momentum", {.kind = OptimizerKind::kSgd, .lr = 0.05, .momentum = 0.9}},
    {"Sgd", {.kind = OptimizerKind::kSgd, .lr = 0.05}}};

inline std::vector<std::string> names_of_optimizers() {
  std::vector<std::string> names;
  for (const auto& [name, options] : kOptimizers) names.push_back(name);
  return names;
}

struct Precision {
  std::string name;
  PrecisionOptions options;
  friend void PrintTo(const Precision& precision, std::ostream* out) { *out << precision.name; }
};

inline const std::vector<Precision> kPrecisions = {{"Fp32", {}},
                                                   {"Bf16", {.weight_dtype = at::kBFloat16}},
                                                   {"Low",
                                                    {.weight_dtype = at::kBFloat16,
                                                     .accumulation_dtype = at::kBFloat16,
                                                     .update_dtype = at::kBFloat16,
                                                     .buffer_dtype = at::kBFloat16}}};

inline Config disk_config(int world, const PagerPolicy& policy, const OptimizerOptions& optimizer,
                          const PrecisionOptions& precision) {
  Config config = default_config(world);
  config.batch = {2 * world, 1, 2};
  config.optimizer = optimizer;
  config.precision = precision;
  config.gradient_clipping = 0.5;
  config.pager = policy;
  return config;
}

inline void train(Engine& engine, const TrainedModel& model, const Rank& rank, int64_t steps) {
  for (int64_t micro = 0; micro < 2 * steps; ++micro) {
    const int64_t round = engine.micro_steps();
    engine.backward(model.loss({round * rank.size() + rank.id(), round}));
    engine.step();
  }
}

/// Weights and, with "state " before their names, optimizer states, whole.
inline ByName tensors_of(const torch::nn::Module& module, const OptimizerOptions& optimizer) {
  ByName tensors;
  for (const auto& item : module.named_parameters()) {
    tensors[item.key()] = *safe_get_full_fp32_param(item.value());
    for (const std::string& state : optimizer_states(optimizer))
      tensors[state + " of " + item.key()] = *safe_get_full_optimizer_state(item.value(), state);
  }
  return tensors;
}

inline void expect_equal(const ByName& found, const ByName& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(at::equal(found.at(name), tensor)) << name;
}

inline ByName trained(const ModelCase& model_case, const Config& config, int world) {
  ByName tensors;
  run_ranks(world, [&](Rank& rank) {
    at::set_num_threads(1);
    const TrainedModel model = model_case.make();
    Engine engine(rank.world(), *model.module, {.config = config});
    train(engine, model, rank, kDiskSteps);
    const ByName own = tensors_of(*model.module, *config.optimizer);
    engine.destroy();
    if (rank.id() == 0) tensors = own;
  });
  return tensors;
}

inline const OptimizerOptions kAdamW = kOptimizers.at("AdamW");

/// Fails once, at transfer number `at`.
class FailingFile final : public DiskFile {
 public:
  FailingFile(std::unique_ptr<DiskFile> file, int at) : file_(std::move(file)), left_(at) {}
  void read(int64_t offset, std::span<std::byte> to) override {
    count("read");
    file_->read(offset, to);
  }
  void write(int64_t offset, std::span<const std::byte> from) override {
    count("write");
    file_->write(offset, from);
  }

 private:
  void count(const char* what) {
    if (left_-- == 0) throw IoError(str("the disk: ", what, " failed: Input/output error"));
  }
  std::unique_ptr<DiskFile> file_;
  std::atomic<int> left_;
};

/// A folder whose disk has no room for what rank 1 asks for.
inline std::function<std::unique_ptr<DiskFile>(const std::string& folder, int64_t bytes)> full_on_rank_1(
    const Rank& rank) {
  return [id = rank.id()](const std::string& folder, int64_t bytes) {
    return make_disk_file(folder, id == 1 ? int64_t{1} << 42 : bytes);
  };
}

/// Writes to it fail while `fails`.
class ReadOnlyFile final : public DiskFile {
 public:
  ReadOnlyFile(std::unique_ptr<DiskFile> file, const bool& fails) : file_(std::move(file)), fails_(fails) {}
  void read(int64_t offset, std::span<std::byte> to) override { file_->read(offset, to); }
  void write(int64_t offset, std::span<const std::byte> from) override {
    if (fails_) throw IoError("the disk is read-only");
    file_->write(offset, from);
  }

 private:
  std::unique_ptr<DiskFile> file_;
  const bool& fails_;
};

}  // namespace trireme::testing
