// Layers that are cut over ranks: what is saved, exported and shown of them is the model's, whatever the cut.
#include <ATen/Parallel.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "tests/training/slices.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/base/state_names.h"
#include "trireme/checkpoint/consolidate.h"
#include "trireme/checkpoint/convert.h"
#include "trireme/checkpoint/inspect.h"
#include "trireme/formats/safetensors.h"
#include "trireme/pager/init/gathered.h"

namespace trireme::slices {
namespace {

constexpr int kSamples = 4;  // of a step, over all data-parallel ranks
const std::string kFrozen = "model.norm.weight";

using Path = std::filesystem::path;

/// A training on each rank of a run.
class Job {
 public:
  Job(Rank& rank, const TrainingRun& run, uint64_t seed, const std::function<void(TrainingOptions&)>& change = {})
      : run_(run),
        place_(rank.id() / run.tensor),
        module_(run.is_packed ? make_packed_part(seed + rank.id()) : make_llama_part(seed + rank.id())) {
    at::set_num_threads(1);
    TrainingOptions options = options_of(run);
    if (change) change(options);
    training_.emplace(rank.world(), *module_, options);
  }

  Training& training() { return *training_; }
  at::Tensor parameter(const std::string& name) const { return module_->named_parameters()[name]; }
  std::vector<std::string> trained() const {
    std::vector<std::string> names;
    for (const auto& item : module_->named_parameters())
      if (item.value().requires_grad() && item.key() != "lm_head.weight") names.push_back(item.key());
    return names;
  }

  void backward_of(int step) {
    const int count = kSamples / run_.data;
    std::vector<int64_t> samples;
    for (int i = 0; i < count; ++i) samples.push_back(step * kSamples + place_ * count + i);
    backward(*training_, samples);
  }
  void step(int number) {
    backward_of(number);
    EXPECT_TRUE(training_->step().step().ended_window);
  }

  /// Weights and buffers as they are exported, masters and moments; the same on every rank.
  Tensors whole_state(const Path& folder) {
    training_->export_weights(folder, {.name = "now.safetensors"});
    Tensors all;
    for (const auto& [name, tensor] : read_safetensors(folder / "now.safetensors"))
      all[weight_name(name)] = tensor.clone();
    for (const std::string& name : trained()) {
      all[master_name(name)] = *safe_get_full_fp32_param(parameter(name));
      for (const char* state : {"exp_avg", "exp_avg_sq"})
        all[optimizer_state_name(state, name)] = *safe_get_full_optimizer_state(parameter(name), state);
    }
    training_->groups().model.barrier();  // before another rank writes the file anew
    return all;
  }
  /// The parameters, whole.
  Tensors end() {
    training_->destroy();
    return parameters_of(*module_);
  }

 private:
  const TrainingRun run_;
  const int place_;
  const std::shared_ptr<Part> module_;
  std::optional<Training> training_;
};

void expect_same(const Tensors& got, const Tensors& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(at::equal(got.at(name), tensor)) << name;
}

void expect_near(const Tensors& got, const Tensors& expected, double tolerance) {
  for (const auto& [name, tensor] : expected)
    EXPECT_TRUE(at::allclose(got.at(name), tensor, tolerance, tolerance)) << name;
}

std::string bytes_of(const Path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Trains two steps on the ranks of `run` and saves `tag`. Returns the state, and what one more step makes of weights.
struct Saved {
  Tensors state, next;
};
Saved train_and_save(const TrainingRun& run, const Path& folder, const std::string& tag) {
  Saved saved;
  run_ranks(run.world(), [&](Rank& rank) {
    Job job(rank, run, 7);
    for (int step = 0; step < 2; ++step) job.step(step);
    (void)job.training().save(folder, {.tag = tag, .client_state = R"({"epoch":3})"});
    const Tensors state = job.whole_state(folder);
    job.step(2);
    const Tensors next = job.end();
    if (rank.id() == 0) saved = {state, next};
  });
  return saved;
}

class SlicesIn : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(SlicesIn, CheckpointsLoadIntoAnyOtherCut) {
  const TemporaryFolder folder;
  std::vector<TrainingRun> chain = {{.tensor = 2, .stage = kZeroStages[4]},
                                    {.tensor = 4, .stage = kZeroStages[0]},
                                    {.tensor = 1, .stage = kZeroStages[1]},
                                    {.tensor = 2, .data = 2, .stage = kZeroStages[2]},
                                    {.data = 4, .stage = kZeroStages[3]},
                                    {.tensor = 4, .stage = kZeroStages[3]},
                                    {.tensor = 4, .data = 2, .stage = kZeroStages[2]},
                                    {.tensor = 2, .data = 2, .stage = kZeroStages[4]}};
  for (TrainingRun& run : chain) run.dtype = GetParam();
  const Saved saved = train_and_save(chain[0], folder.path(), "0");
  ASSERT_EQ(saved.state.contains(weight_name("table")), true);
  for (size_t i = 1; i < chain.size(); ++i) {
    const TrainingRun& run = chain[i];
    SCOPED_TRACE(str("tensor ", run.tensor, ", data ", run.data, ", ", run.stage.name));
    run_ranks(run.world(), [&](Rank& rank) {
      Job job(rank, run, 100 * i);
      const auto loaded = job.training().load(folder.path(), {.tag = std::to_string(i - 1)});
      ASSERT_TRUE(loaded);
      EXPECT_EQ(loaded->client_state, R"({"epoch":3})");
      expect_same(job.whole_state(folder.path()), saved.state);
      (void)job.training().save(folder.path(), {.tag = std::to_string(i), .client_state = loaded->client_state});
      job.step(2);  // which the counts of steps and the moments decide
      expect_near(job.end(), saved.next, GetParam() == at::kFloat ? 2e-5 : 2e-2);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Tensor, SlicesIn, ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return info.param == at::kFloat ? "Fp32" : "Bf16"; });

Tensors tensors_of(const CheckpointSource& source) {
  TensorReader reader(source);
  Tensors all;
  for (size_t i = 0; i < source.manifest.tensors.size(); ++i) {
    const SavedTensor& saved = source.manifest.tensors[i];
    const at::Tensor tensor = all[saved.name] = at::empty(saved.shape, saved.dtype);
    reader.read(i, 0, tensor.numel(), static_cast<std::byte*>(tensor.data_ptr()));
  }
  return all;
}

/// Elements of one tensor in each of its parts, as saved.
std::vector<int64_t> numels_of_parts(const SavedTensor& saved) {
  std::vector<int64_t> numels(std::max<size_t>(saved.parts.size(), 1));
  for (const SavedSlice& slice : saved.slices) numels[slice.part] += slice.numel;
  return numels;
}

// Ranks 0 and 1 have rows 16-20 of the packed matrices, 2 and 3 rows 36-40, and rows of their own.
TEST(SlicesThatMeet, LoadIntoAnyOtherCut) {
  const std::vector<TrainingRun> chain = {{.tensor = 4, .stage = kZeroStages[2], .is_packed = true},
                                          {.tensor = 2, .stage = kZeroStages[4], .is_packed = true},
                                          {.tensor = 4, .data = 2, .stage = kZeroStages[3], .is_packed = true},
                                          {.tensor = 1, .stage = kZeroStages[1], .is_packed = true},
                                          {.tensor = 4, .stage = kZeroStages[2], .is_packed = true}};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const TemporaryFolder folder;
    TrainingRun first = chain[0];
    first.dtype = dtype;
    const Saved saved = train_and_save(first, folder.path(), "0");
    for (size_t i = 1; i < chain.size(); ++i) {
      TrainingRun run = chain[i];
      run.dtype = dtype;
      SCOPED_TRACE(str(dtype, ", tensor ", run.tensor, ", data ", run.data, ", ", run.stage.name));
      run_ranks(run.world(), [&](Rank& rank) {
        Job job(rank, run, 100 * i);
        ASSERT_TRUE(job.training().load(folder.path(), {.tag = std::to_string(i - 1)}));
        expect_same(job.whole_state(folder.path()), saved.state);
        (void)job.training().save(folder.path(), {.tag = std::to_string(i)});
        job.step(2);
        const Tensors next = job.end();
        expect_near(next, saved.next, dtype == at::kFloat ? 2e-5 : 2e-2);
        if (i + 1 == chain.size()) expect_same(next, saved.next);  // at the first cut again
      });
    }
    // Each element once, in the part of the first rank that has it.
    const CheckpointSource slices = open_checkpoint(folder.path(), "0"), whole = open_checkpoint(folder.path(), "3");
    expect_same(tensors_of(slices), tensors_of(whole));
    size_t checked = 0;
    for (const SavedTensor& tensor : slices.manifest.tensors)
      if (tensor.name.ends_with("query_key_value.weight")) {
        EXPECT_EQ(numels_of_parts(tensor), (std::vector<int64_t>{576, 384, 576, 384})) << tensor.name;
        EXPECT_EQ(tensor.parts[1], (TensorPart{{40, 48}, 0, {{8, 16}}})) << tensor.name;
        ++checked;
      }
    EXPECT_EQ(checked, dtype == at::kFloat ? 6U : 8U);  // two weights, their moments and masters
    EXPECT_TRUE(inspect_checkpoint(folder.path(), "0").healthy());
    (void)consolidate(slices, folder.path() / "from_slices");
    (void)consolidate(whole, folder.path() / "from_whole");
    EXPECT_EQ(bytes_of(folder.path() / "from_slices/model.safetensors"),
              bytes_of(folder.path() / "from_whole/model.safetensors"));
  }
}

/// A checkpoint of slices over four ranks, and what one process saves after it has loaded that.
class SlicesInFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    saved_ = train_and_save({.tensor = 4, .stage = kZeroStages[2], .dtype = at::kBFloat16}, folder_.path(), "slices");
    run_ranks(1, [&](Rank& rank) {
      Job job(rank, {.dtype = at::kBFloat16}, 5);
      ASSERT_TRUE(job.training().load(folder_.path(), {.tag = "slices"}));
      (void)job.training().save(folder_.path(), {.tag = "whole", .client_state = R"({"epoch":3})"});
      job.training().export_weights(folder_.path(), {.name = "whole.safetensors"});
    });
    slices_ = open_checkpoint(folder_.path(), "slices");
    whole_ = open_checkpoint(folder_.path(), "whole");
  }

  const TemporaryFolder folder_;
  Saved saved_;
  CheckpointSource slices_, whole_;
};

TEST_F(SlicesInFiles, HoldEachElementOnce) {
  const std::vector<SavedTensor>& tensors = slices_.manifest.tensors;
  ASSERT_EQ(tensors.size(), whole_.manifest.tensors.size());
  std::map<std::string, size_t> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const SavedTensor& expected = whole_.manifest.tensors[i];
    EXPECT_EQ(tensors[i].name, expected.name);  // the model's order
    EXPECT_EQ(tensors[i].shape, expected.shape) << expected.name;
    EXPECT_EQ(tensors[i].values, expected.values) << expected.name;  // steps, groups, aliases
    int64_t numel = 0, expected_numel = 0;
    for (const SavedSlice& slice : tensors[i].slices) numel += slice.numel;
    for (const SavedSlice& slice : expected.slices) expected_numel += slice.numel;
    EXPECT_EQ(numel, expected_numel) << expected.name;
    parts[expected.name] = tensors[i].parts.size();
  }
  EXPECT_EQ(parts.at("model.model.layers.0.self_attn.q_proj.weight"), 4U);
  EXPECT_EQ(parts.at("optimizer.exp_avg.model.layers.0.self_attn.k_proj.weight"), 2U);  // heads that two ranks have
  EXPECT_EQ(parts.at("master.model.layers.0.input_layernorm.weight"), 0U);
  EXPECT_EQ(parts.at("model.table"), 0U);
  const CheckpointReport report = inspect_checkpoint(folder_.path(), "slices");
  EXPECT_TRUE(report.healthy());
  ASSERT_EQ(report.kinds.size(), inspect_checkpoint(folder_.path(), "whole").kinds.size());
  EXPECT_EQ(slices_.manifest.topology.back().name, "tensor");
}

TEST_F(SlicesInFiles, AreReadByProgramsThatKnowNoSlices) {
  (void)consolidate(slices_, folder_.path() / "from_slices");
  (void)consolidate(whole_, folder_.path() / "from_whole");
  EXPECT_EQ(bytes_of(folder_.path() / "from_slices/model.safetensors"),
            bytes_of(folder_.path() / "from_whole/model.safetensors"));
  (void)write_deepspeed_checkpoint(slices_, folder_.path() / "deepspeed", {.stage = 2, .ranks = 2}, {.tag = "again"});
  (void)write_trireme_checkpoint(open_checkpoint(folder_.path() / "deepspeed", "again"), folder_.path(),
                                 {.tag = "from_deepspeed"});
  (void)write_trireme_checkpoint(slices_, folder_.path(), {.tag = "copy"});
  for (const char* tag : {"from_deepspeed", "copy"}) {
    const TrainingRun run{.tensor = 2, .stage = kZeroStages[4], .dtype = at::kBFloat16};
    run_ranks(run.world(), [&](Rank& rank) {
      Job job(rank, run, 11);
      ASSERT_TRUE(job.training().load(folder_.path(), {.tag = tag})) << tag;
      expect_same(job.whole_state(folder_.path()), saved_.state);
      (void)job.end();
    });
  }
}

TEST_F(SlicesInFiles, AreExportedAsOneProcessExports) {
  for (const TrainingRun& run : {TrainingRun{.tensor = 2, .data = 2, .stage = kZeroStages[4], .dtype = at::kBFloat16},
                                 TrainingRun{.tensor = 4, .stage = kZeroStages[1], .dtype = at::kBFloat16}}) {
    run_ranks(run.world(), [&](Rank& rank) {
      Job job(rank, run, 13);
      ASSERT_TRUE(job.training().load(folder_.path(), {.tag = "slices"}));
      job.training().export_weights(folder_.path(), {.name = "slices.safetensors"});
      (void)job.end();
    });
    EXPECT_EQ(bytes_of(folder_.path() / "slices.safetensors"), bytes_of(folder_.path() / "whole.safetensors"));
  }
}

TEST_F(SlicesInFiles, LoadAsWeightsAlone) {
  const TrainingRun run{.tensor = 2, .stage = kZeroStages[2], .dtype = at::kBFloat16};
  run_ranks(run.world(), [&](Rank& rank) {
    Job job(rank, run, 17);
    ASSERT_TRUE(job.training().load(folder_.path(), {.tag = "slices", .load_module_only = true}));
    const Tensors state = job.whole_state(folder_.path());
    for (const auto& [name, tensor] : saved_.state) {
      const StateName parsed = parse_state_name(name);
      if (parsed.kind == StateKind::kWeight) {
        EXPECT_TRUE(at::equal(state.at(name), tensor)) << name;
      } else if (parsed.kind == StateKind::kMaster) {
        const at::Tensor weight = saved_.state.at(weight_name(parsed.parameter));
        EXPECT_TRUE(at::equal(state.at(name), weight.to(at::kFloat))) << name;
      } else {
        EXPECT_TRUE(at::equal(state.at(name), at::zeros_like(tensor))) << name;
      }
    }
    (void)job.end();
  });
}

TEST_F(SlicesInFiles, MayBeSavedInTheBackgroundAndWithoutFrozenParameters) {
  const TrainingRun run{.tensor = 4, .stage = kZeroStages[3], .dtype = at::kBFloat16};
  run_ranks(run.world(), [&](Rank& rank) {
    Job job(rank, run, 19,
            [](TrainingOptions& options) { std::get<Config>(options.config).checkpoint.async_save = true; });
    ASSERT_TRUE(job.training().load(folder_.path(), {.tag = "slices"}));
    (void)job.training().save(folder_.path(), {.tag = "background", .exclude_frozen_parameters = true});
    job.step(2);  // while the checkpoint is written
    ASSERT_TRUE(job.training().wait_for_save());
    (void)job.end();
  });
  for (const SavedTensor& tensor : open_checkpoint(folder_.path(), "background").manifest.tensors)
    EXPECT_NE(tensor.name, weight_name(kFrozen));
  for (const int tensor : {1, 2}) {
    const TrainingRun other{.tensor = tensor, .stage = kZeroStages[1], .dtype = at::kBFloat16};
    run_ranks(other.world(), [&](Rank& rank) {
      Job job(rank, other, 23);
      Tensors expected = saved_.state;
      expected[weight_name(kFrozen)] = job.parameter(kFrozen).detach().clone();
      ASSERT_TRUE(job.training().load(folder_.path(), {.tag = "background"}));
      expect_same(job.whole_state(folder_.path()), expected);
      (void)job.end();
    });
  }
}

TEST(SlicesOfOptimizers, OfTheProgramsOwnLoadIntoAnyOtherCut) {
  const TemporaryFolder folder;
  const auto own = [](TrainingOptions& options) {
    std::get<Config>(options.config).optimizer.reset();
    options.client_optimizer = [](const std::vector<at::Tensor>& parts, const std::vector<std::string>&) {
      return std::make_unique<torch::optim::AdamW>(parts, torch::optim::AdamWOptions(1e-2));
    };
  };
  const std::vector<TrainingRun> chain = {{.tensor = 1, .stage = kZeroStages[0]},
                                          {.tensor = 2, .data = 2, .stage = kZeroStages[4]},
                                          {.tensor = 4, .stage = kZeroStages[1]},
                                          {.tensor = 1, .data = 2, .stage = kZeroStages[2]}};
  Tensors next;
  for (size_t i = 0; i < chain.size(); ++i)
    run_ranks(chain[i].world(), [&](Rank& rank) {
      Job job(rank, chain[i], 100 * i, own);
      if (i == 0) {
        for (int step = 0; step < 2; ++step) job.step(step);
      } else {
        ASSERT_TRUE(job.training().load(folder.path(), {.tag = std::to_string(i - 1)}));
      }
      (void)job.training().save(folder.path(), {.tag = std::to_string(i)});
      job.step(2);
      const Tensors weights = job.end();
      if (i == 0) next = weights;
      if (i > 0) expect_near(weights, next, 2e-5);
    });
  const auto first = open_checkpoint(folder.path(), "0"), last = open_checkpoint(folder.path(), "3");
  expect_same(tensors_of(last), tensors_of(first));
}

/// Trains a step, and shows gradients, values and moments in the middle of the next one.
void look(Job& job, Tensors& shown) {
  job.step(0);
  job.backward_of(1);
  for (const std::string& name : job.trained()) {
    shown["gradient " + name] = *safe_get_full_grad(job.parameter(name));
    shown["value " + name] = *safe_get_full_fp32_param(job.parameter(name));
    shown["first " + name] = *safe_get_full_optimizer_state(job.parameter(name), "exp_avg");
  }
  (void)job.training().step().step();
}

void expect_shown(const Tensors& shown, const Tensors& expected) {
  ASSERT_FALSE(expected.empty());
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(shown.at(name).sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(at::allclose(shown.at(name), tensor, 1e-4, 1e-5)) << name;
  }
}

class SlicesShown : public ::testing::TestWithParam<ZeroStage> {};

TEST_P(SlicesShown, AsTheModelsParameters) {
  const TrainingRun run{.tensor = 2, .data = 2, .stage = GetParam()};
  Tensors expected;
  run_ranks(1, [&](Rank& rank) {
    Job job(rank, {.stage = kZeroStages[0]}, 7);
    look(job, expected);
    (void)job.end();
  });
  run_ranks(run.world(), [&](Rank& rank) {
    Job job(rank, run, 7);
    Tensors shown;
    look(job, shown);
    expect_shown(shown, expected);
    EXPECT_FALSE(safe_get_full_fp32_param(job.parameter(kFrozen)));
    (void)job.end();
  });
}

// Ranks that share a part of a matrix show and set it as one.
TEST_P(SlicesShown, WherePartsMeet) {
  const TrainingRun run{.tensor = 4, .stage = GetParam(), .is_packed = true};
  Tensors expected;
  run_ranks(1, [&](Rank& rank) {
    Job job(rank, {.stage = kZeroStages[0], .is_packed = true}, 7);
    look(job, expected);
    (void)job.end();
  });
  run_ranks(run.world(), [&](Rank& rank) {
    Job job(rank, run, 7);
    Tensors shown;
    look(job, shown);
    expect_shown(shown, expected);
    for (const std::string& name : job.trained()) {
      const at::Tensor parameter = job.parameter(name);
      const at::Tensor value = *safe_get_full_fp32_param(parameter) * 2;
      safe_set_full_fp32_param(parameter, value);
      safe_set_full_optimizer_state(parameter, value, "exp_avg");
      EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(parameter), value)) << name;
      EXPECT_TRUE(at::equal(whole_weight(parameter), value)) << name;
      EXPECT_TRUE(at::equal(*safe_get_full_optimizer_state(parameter, "exp_avg"), value)) << name;
    }
    (void)job.end();
  });
}

at::Tensor numbers(const std::vector<int64_t>& shape, double factor) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return at::arange(numel, at::kFloat).mul(factor).view(shape);
}

TEST_P(SlicesShown, AreSetAsTheModelsParameters) {
  const TrainingRun run{.tensor = 2, .data = 2, .stage = GetParam()};
  run_ranks(run.world(), [&](Rank& rank) {
    Job job(rank, run, 7);
    job.backward_of(0);
    for (const auto& [name, shape] : llama_shapes()) {
      if (name == kFrozen) continue;
      const at::Tensor parameter = job.parameter(name);
      safe_set_full_fp32_param(parameter, numbers(shape, 0.5));
      safe_set_full_optimizer_state(parameter, numbers(shape, 0.25), "exp_avg_sq");
      safe_set_full_grad(parameter, numbers(shape, 0.125));
      EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(parameter), numbers(shape, 0.5))) << name;
      EXPECT_TRUE(at::equal(*safe_get_full_optimizer_state(parameter, "exp_avg_sq"), numbers(shape, 0.25))) << name;
      EXPECT_TRUE(at::equal(*safe_get_full_grad(parameter), numbers(shape, 0.125))) << name;
      const at::Tensor local = *safe_get_local_fp32_param(parameter);
      EXPECT_EQ(local.numel(), safe_get_local_grad(parameter)->numel());
      EXPECT_LE(local.numel(), parameter.numel());
      safe_set_local_fp32_param(parameter, local * 2);
      EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(parameter), numbers(shape, 1))) << name;
      safe_set_local_fp32_param(parameter, local);
    }
    std::vector<at::Tensor> all;
    for (const std::string& name : job.trained()) all.push_back(job.parameter(name));
    size_t next = 0;
    safe_update_full_grad_vectorized(all, [&](const at::Tensor& gradient, const at::Tensor& parameter) {
      EXPECT_TRUE(parameter.is_same(all[next]));
      EXPECT_EQ(gradient.sizes(), at::IntArrayRef(llama_shapes()[next++].second));
      return gradient * 2;
    });
    for (const auto& [name, shape] : llama_shapes()) {
      if (name == kFrozen) continue;
      EXPECT_TRUE(at::equal(*safe_get_full_grad(job.parameter(name)), numbers(shape, 0.25))) << name;
    }
    for (const auto& [name, shape] : llama_shapes())
      if (name != kFrozen) {
        EXPECT_TRUE(at::equal(whole_weight(job.parameter(name)), numbers(shape, 0.5))) << name;
      }
    EXPECT_EQ(whole_weight(job.parameter(kFrozen)).sizes(), at::IntArrayRef({8}));
    const at::Tensor query = job.parameter("model.layers.0.self_attn.q_proj.weight");
    EXPECT_SAYS(error_of<ShapeError>([&] { safe_set_full_fp32_param(query, at::zeros_like(query)); }),
                "'model.layers.0.self_attn.q_proj.weight' has the shape [8, 8], got a value of [4, 8]");
    const auto modify = [&] { (void)zero::GatheredParameters({query}, {.modifier_rank = 0}); };
    EXPECT_SAYS(error_of<StateError>(modify), "is of an engine with tensor_parallel, whose ranks have slices");
    {
      const zero::GatheredParameters slice({query});
      const WithoutInterception as_it_is;
      const Interval rows = rank.id() % 2 == 0 ? Interval{0, 4} : Interval{4, 8};
      EXPECT_TRUE(at::equal(query, numbers({8, 8}, 0.5).slice(0, rows.begin, rows.end)));
    }
    (void)job.training().step().step();
    const Tensors weights = job.end();
    EXPECT_EQ(weights.at("model.layers.0.self_attn.q_proj.weight").sizes(), at::IntArrayRef({8, 8}));
  });
}

TEST_P(SlicesShown, AsThisRanksGradientsBeforeTheyAreReduced) {
  if (GetParam().policy.stage < 2) return;  // which reduce once, in the end
  const TrainingRun run{.tensor = 2, .stage = GetParam()};
  run_ranks(run.world(), [&](Rank& rank) {
    Job job(rank, run, 7);
    job.training().pager().defer_reductions(true);
    backward(job.training(), {5});
    for (const auto& [name, shape] : llama_shapes()) {
      if (name == kFrozen) continue;
      EXPECT_TRUE(at::allclose(*safe_get_full_grad(job.parameter(name)), gradient_of(name, shape, 5))) << name;
    }
    job.training().pager().defer_reductions(false);
    (void)job.training().step().step();
    (void)job.end();
  });
}

INSTANTIATE_TEST_SUITE_P(Tensor, SlicesShown, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

}  // namespace
}  // namespace trireme::slices
