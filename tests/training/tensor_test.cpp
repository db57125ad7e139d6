// Layers that are cut over ranks: slices, steps and norms against one process. The loss gives each parameter any
// gradient.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/error_of.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/pager/init/init.h"
#include "trireme/training/training.h"

namespace trireme::slices {
namespace {

using namespace testing;

using Tensors = std::map<std::string, at::Tensor>;
using Shapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

constexpr int kSteps = 3;
constexpr int64_t kHeads = 4, kKeyValueHeads = 2;

/// Of a Llama; over four ranks, vocabulary and MLP are cut unevenly, and each key and value head has two ranks.
Shapes llama_shapes() {
  Shapes shapes = {{"model.embed_tokens.weight", {10, 8}}};
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    const Shapes more = {{layer + "self_attn.q_proj.weight", {8, 8}}, {layer + "self_attn.q_proj.bias", {8}},
                         {layer + "self_attn.k_proj.weight", {4, 8}}, {layer + "self_attn.v_proj.weight", {4, 8}},
                         {layer + "self_attn.o_proj.weight", {8, 8}}, {layer + "mlp.gate_proj.weight", {50, 8}},
                         {layer + "mlp.up_proj.weight", {50, 8}},     {layer + "mlp.down_proj.weight", {8, 50}},
                         {layer + "input_layernorm.weight", {8}},     {layer + "post_attention_layernorm.weight", {8}}};
    shapes.insert(shapes.end(), more.begin(), more.end());
  }
  shapes.push_back({"model.norm.weight", {8}});
  return shapes;
}

PartitionModel llama_facts() { return {.model_type = "llama", .heads = kHeads, .key_value_heads = kKeyValueHeads}; }

/// Parameters of any names, without operators.
class Part : public torch::nn::Module {
 public:
  void add(const std::string& path, const at::Tensor& value) {
    const size_t dot = path.find('.');
    if (dot == std::string::npos) {
      register_parameter(path, value.clone());
      return;
    }
    inside(path.substr(0, dot)).add(path.substr(dot + 1), value);
  }
  void tie(const std::string& name, const at::Tensor& parameter) {
    inside(name.substr(0, name.find('.'))).register_parameter(name.substr(name.find('.') + 1), parameter);
  }

 private:
  Part& inside(const std::string& name) {
    if (!parts_.contains(name)) parts_[name] = register_module(name, std::make_shared<Part>());
    return *parts_[name];
  }
  std::map<std::string, std::shared_ptr<Part>> parts_;
};

std::shared_ptr<Part> make_part(const Shapes& shapes, uint64_t seed) {
  auto part = std::make_shared<Part>();
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const auto& [name, shape] : shapes) part->add(name, at::randn(shape, generator));
  part->register_buffer("table", at::full({3}, static_cast<double>(seed)));
  return part;
}

/// The tied Llama, with a frozen norm.
std::shared_ptr<Part> make_llama_part(uint64_t seed) {
  auto part = make_part(llama_shapes(), seed);
  part->tie("lm_head.weight", part->named_parameters()["model.embed_tokens.weight"]);
  part->named_parameters()["model.norm.weight"].requires_grad_(false);
  return part;
}

/// Of the gradient that a data-parallel rank's micro-batch gives, whole, by name.
at::Tensor gradient_of(const std::string& name, const std::vector<int64_t>& shape, int64_t sample) {
  return at::randn(shape, at::detail::createCPUGenerator(1000 * sample + std::hash<std::string>()(name) % 1000));
}

/// The elements of `whole` that a rank has.
at::Tensor cut(const at::Tensor& whole, const TensorPart& part) {
  if (part.dim < 0) return whole;
  std::vector<at::Tensor> pieces;
  for (const Interval& own : part.intervals) pieces.push_back(whole.slice(part.dim, own.begin, own.end));
  return at::cat(pieces, part.dim);
}

struct Run {
  int tensor = 1;
  int data = 1;
  Variant variant = {};
  double clipping = 0;
  at::ScalarType dtype = at::kFloat;
  int accumulation = 1;
  bool is_deterministic = false;
  bool is_on_device = false;
  double offload_ratio = 0;
  OptimizerOptions optimizer = {.lr = 1e-2};

  int world() const { return tensor * data; }
};

TrainingOptions options_of(const Run& run) {
  const Degrees degrees{.tensor = run.tensor};
  TrainingOptions options{.config = default_config(run.world(), degrees), .partition_model = llama_facts()};
  options.config.pager = harsh_policy(run.variant);
  options.config.pager.deterministic = run.is_deterministic;
  options.config.pager.offload_ratio = run.offload_ratio;
  options.config.gradient_clipping = run.clipping;
  options.config.batch.gradient_accumulation_steps = run.accumulation;
  options.config.batch.train_batch_size = int64_t{run.data} * run.accumulation;
  options.config.precision.weight_dtype = run.dtype;
  if (run.dtype == at::kHalf) options.config.precision.loss_scale.loss_scale = 64;
  options.config.optimizer = run.optimizer;
  return options;
}

/// A backward pass whose gradients are the mean of `samples`', in slices.
void backward(Training& training, const std::vector<int64_t>& samples) {
  at::Tensor loss;
  const std::vector<ParameterSpec>& specs = training.pager().parameters();
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].trainable) continue;
    const TensorPart part = specs[i].part.shape.empty() ? TensorPart{specs[i].shape} : specs[i].part;
    at::Tensor gradient;
    for (const int64_t sample : samples) {
      const at::Tensor one = gradient_of(specs[i].name, part.shape, sample) / static_cast<double>(samples.size());
      gradient = gradient.defined() ? gradient + one : one;
    }
    const at::Tensor parameter = training.pager().whole(static_cast<int>(i));
    const at::Tensor term = (parameter.to(at::kFloat) * gradient.to(parameter.device())).sum();  // on slices
    loss = loss.defined() ? loss + term : term;
  }
  loss = training.step().scale(loss);
  training.step().backward_from({torch::autograd::impl::gradient_edge(loss)}, {at::ones_like(loss)}, {});
}

struct Result {
  std::vector<Tensors> weights;            ///< after training, by rank
  std::vector<Tensors> first;              ///< before it
  std::vector<std::vector<double>> norms;  ///< by rank
  std::vector<double> buffers;             ///< by rank
  PartitionPlan plan;
};

Tensors weights_of(Training& training) {
  Tensors weights;
  for (size_t i = 0; i < training.pager().parameters().size(); ++i)
    weights[training.pager().parameters()[i].name] = training.pager().whole(static_cast<int>(i)).detach().cpu().clone();
  return weights;
}

/// Samples are the same whatever the run: those of all data-parallel ranks and micro-batches of a step.
Result train(const Run& run, int samples_per_step) {
  Result result;
  result.weights.resize(run.world());
  result.first.resize(run.world());
  result.norms.resize(run.world());
  result.buffers.resize(run.world());
  const int per_pass = samples_per_step / (run.data * run.accumulation);
  run_ranks(run.world(), [&](Rank& rank) {
    at::set_num_threads(1);
    const auto module = make_llama_part(7 + rank.id());  // rank 0's values count
    std::unique_ptr<Group> group;
    if (run.is_on_device) {
      move_to_fake(*module, fake_device(rank.id()));
      if (run.world() > 1) group = make_fake_nccl_group(rank.world(), fake_device(rank.id()));
    }
    Training training(group ? *group : rank.world(), *module, options_of(run));
    result.first[rank.id()] = weights_of(training);
    const int place = rank.id() / run.tensor;
    for (int step = 0; step < kSteps; ++step) {
      for (int pass = 0; pass < run.accumulation; ++pass) {
        std::vector<int64_t> samples;
        for (int i = 0; i < per_pass; ++i)
          samples.push_back(step * samples_per_step + (place * run.accumulation + pass) * per_pass + i);
        backward(training, samples);
        const bool ends = training.step().step().ended_window;
        EXPECT_EQ(ends, pass + 1 == run.accumulation);
      }
      result.norms[rank.id()].push_back(training.step().outcome().norm.value_or(-1));
    }
    if (rank.id() == 0 && training.partition() != nullptr) result.plan = *training.partition();
    EXPECT_EQ(training.partition() != nullptr, run.tensor > 1);
    EXPECT_EQ(training.groups().tensor != nullptr, run.tensor > 1);
    training.destroy();
    for (const auto& item : module->named_parameters())
      result.weights[rank.id()][item.key()] = item.value().detach().cpu();
    result.buffers[rank.id()] = module->named_buffers()["table"][0].item<double>();
  });
  return result;
}

/// Ranks have slices of `whole`, or where `is_joined` all of it.
void expect_slices(const Run& run, const Tensors& whole, const std::vector<Tensors>& got, const PartitionPlan& plan,
                   double tolerance, bool is_joined) {
  size_t cut_ones = 0;
  for (int rank = 0; rank < run.world(); ++rank)
    for (const PartitionedParameter& parameter : plan.parameters) {
      const TensorPart& part = parameter.parts[rank % run.tensor];
      cut_ones += part.dim >= 0;
      const at::Tensor expected = is_joined ? whole.at(parameter.name) : cut(whole.at(parameter.name), part),
                       found = got[rank].at(parameter.name);
      ASSERT_EQ(found.sizes(), expected.sizes()) << parameter.name;
      const bool is_right =
          tolerance == 0 ? at::equal(found, expected) : at::allclose(found, expected, tolerance, tolerance);
      EXPECT_TRUE(is_right) << parameter.name << ", rank " << rank;
    }
  EXPECT_EQ(cut_ones, run.world() * 17);  // all but the norms
}

/// Ranks that have the same elements have the same bits.
void expect_alike(const Run& run, const std::vector<Tensors>& got, const PartitionPlan& plan) {
  for (const PartitionedParameter& parameter : plan.parameters)
    for (int one = 0; one < run.world(); ++one)
      for (int other = 0; other < one; ++other) {
        if (parameter.parts[one % run.tensor] != parameter.parts[other % run.tensor]) continue;
        EXPECT_TRUE(at::equal(got[one].at(parameter.name), got[other].at(parameter.name)))
            << parameter.name << ", ranks " << other << " and " << one;
      }
}

/// `run` against one process, at clipping that bites and without.
void expect_as_one_process(Run run, double tolerance) {
  const int samples = run.data * run.accumulation;
  for (const double clipping : {0.0, 0.5}) {
    run.clipping = clipping;
    // Adam looks at no gradient's scale.
    if (clipping > 0) run.optimizer = {.kind = OptimizerKind::kSgd, .lr = 1, .momentum = 0.5};
    const Result alone =
        train({.variant = kVariants[0], .clipping = clipping, .dtype = run.dtype, .optimizer = run.optimizer}, samples);
    const Result got = train(run, samples);
    expect_slices(run, alone.first[0], got.first, got.plan, 0, /*is_joined=*/false);
    expect_slices(run, alone.weights[0], got.weights, got.plan, tolerance, /*is_joined=*/true);  // by destroy()
    expect_alike(run, got.weights, got.plan);
    for (int rank = 0; rank < run.world(); ++rank) {
      EXPECT_EQ(got.buffers[rank], 7) << rank;
      for (int step = 0; step < kSteps; ++step) {
        EXPECT_GT(got.norms[rank][step], 1);
        EXPECT_NEAR(got.norms[rank][step], alone.norms[0][step], 1e-4 * alone.norms[0][step]) << "step " << step;
        EXPECT_EQ(got.norms[rank][step], got.norms[0][step]);
      }
    }
  }
}

class SlicesAt : public ::testing::TestWithParam<Variant> {};

TEST_P(SlicesAt, TrainLikeOneProcess) {
  for (const auto& [tensor, data] : {std::pair{2, 1}, {2, 2}, {4, 1}})
    expect_as_one_process({.tensor = tensor, .data = data, .variant = GetParam()}, 2e-5);
}

TEST_P(SlicesAt, AccumulateLikeOneProcess) {
  expect_as_one_process({.tensor = 2, .data = 2, .variant = GetParam(), .accumulation = 2}, 2e-5);
}

TEST_P(SlicesAt, In16BitsTrainLikeOneProcess) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    expect_as_one_process({.tensor = 2, .data = 1, .variant = GetParam(), .dtype = dtype}, 2e-2);
}

TEST_P(SlicesAt, AreDeterministicToo) {
  if (GetParam().stage == 0) return;
  expect_as_one_process({.tensor = 2, .data = 2, .variant = GetParam(), .is_deterministic = true}, 2e-5);
}

INSTANTIATE_TEST_SUITE_P(Tensor, SlicesAt, ::testing::ValuesIn(kVariants), [](const auto& info) {
  std::string name = info.param.name;
  std::erase(name, ' ');
  return name;
});

// Units hold what is counted and what is not; of offloaded ones the norm is measured as they leave.
TEST(Slices, OfADeviceTrainLikeOneProcess) {
  for (const int variant : {0, 2, 4})
    for (const double offload_ratio : {0.0, 1.0}) {
      if (variant == 0 && offload_ratio > 0) continue;
      expect_as_one_process(
          {.tensor = 2, .data = 2, .variant = kVariants[variant], .is_on_device = true, .offload_ratio = offload_ratio},
          2e-5);
    }
}

// Dropout of what all ranks of a layer compute alike must drop the same elements.
TEST(Slices, DrawTheSameNumbersForTheSameSamples) {
  std::vector<at::Tensor> drawn(4);
  run_ranks(4, [&](Rank& rank) {
    manual_seed(rank.id());
    const auto module = make_llama_part(3);
    Training training(rank.world(), *module,
                      options_of({.tensor = 2, .data = 2, .variant = kVariants[2], .is_deterministic = true}));
    training.step().start_micro_batch(0);
    drawn[rank.id()] = at::rand({4});
    training.destroy();
  });
  EXPECT_TRUE(at::equal(drawn[0], drawn[1]));
  EXPECT_TRUE(at::equal(drawn[2], drawn[3]));
  EXPECT_FALSE(at::equal(drawn[0], drawn[2]));
}

// The squares of all gradients of the model, each once, by a plain sum.
TEST(Slices, CountEachGradientOnce) {
  const Result got = train({.tensor = 4, .variant = kVariants[2]}, 1);
  double squares = 0;
  for (const auto& [name, shape] : llama_shapes())
    if (name != "model.norm.weight") squares += gradient_of(name, shape, 0).square().sum().item<double>();
  EXPECT_NEAR(got.norms[3][0], std::sqrt(squares), 1e-4);
}

/// What each of `ranks` refuses: the same everywhere, and no parameter has changed.
void expect_refused(int ranks, const Shapes& shapes, const std::function<void(TrainingOptions&, int rank)>& change,
                    const std::string& text) {
  run_ranks(ranks, [&](Rank& rank) {
    const auto module = make_part(shapes, 3);
    const Tensors before = parameters_of(*module);
    TrainingOptions options = options_of({.tensor = ranks, .variant = kVariants[1]});
    change(options, rank.id());
    const auto make = [&] { Training(rank.world(), *module, options); };
    EXPECT_SAYS(error_of<ConfigError>(make), text);
    for (const auto& [name, value] : parameters_of(*module)) EXPECT_TRUE(at::equal(value, before.at(name))) << name;
  });
}

TEST(SlicesAreRefused, WithOptimizersOfWholeParameters) {
  for (const OptimizerKind kind : {OptimizerKind::kLamb, OptimizerKind::kMuon})
    expect_refused(
        2, llama_shapes(),
        [&](TrainingOptions& options, int) { options.config.optimizer = OptimizerOptions{.kind = kind}; },
        "looks at whole parameters, and with tensor_parallel (autotp_size=2) a rank has slices");
  run_ranks(2, [](Rank& rank) {
    const auto module = make_part(llama_shapes(), 3);
    TrainingOptions options = options_of({.tensor = 2, .variant = kVariants[1]});
    options.config.optimizer.reset();
    Training training(rank.world(), *module, options);
    EXPECT_SAYS(error_of<ConfigError>(
                    [&] { training.set_optimizer({.optimizer = OptimizerOptions{.kind = OptimizerKind::kLamb}}); }),
                "optimizer Lamb looks at whole parameters");
    training.set_optimizer({.optimizer = OptimizerOptions{}});
    training.destroy();
  });
}

TEST(SlicesAreRefused, WhereRanksShareAPartOfAMatrix) {
  const std::string dense = "transformer.h.0.self_attention.dense.weight",
                    qkv = "transformer.h.0.self_attention.query_key_value.weight";
  expect_refused(
      4, {{qkv, {16, 8}}, {dense, {8, 8}}},
      [](TrainingOptions& options, int) {
        options.partition_model = PartitionModel{.model_type = "bloom", .heads = 4, .key_value_heads = 2};
      },
      "tensor_parallel.autotp_size=4: ranks 0 and 1 share a part of '" + qkv + "'");
}

TEST(SlicesAreRefused, WhereRanksKnowOtherThings) {
  expect_refused(
      2, llama_shapes(),
      [](TrainingOptions& options, int rank) {
        if (rank == 1) options.tp_plan = {{"model.layers.*.mlp.up_proj", "colwise"}};
      },
      "would cut the model differently");
  expect_refused(
      2, llama_shapes(),
      [](TrainingOptions& options, int rank) {
        if (rank == 1) options.tp_plan = {{"model.layers.*.mlp.up_proj", "no style"}};
      },
      "no style");
}

TEST(SlicesAreRefused, WithADegreeThatIsNotTheRanks) {
  expect_refused(
      2, llama_shapes(), [](TrainingOptions& options, int) { options.config.tensor.autotp_size = 4; },
      "tensor_parallel.autotp_size=4, and degrees.tensor=2; let them agree");
}

TEST(SlicesAreRefused, OfWhatInitHasSharded) {
  run_ranks(2, [](Rank& rank) {
    std::shared_ptr<Part> module;
    {
      const zero::Init scope(rank.world(), {.smallest_bytes = 0, .live_bytes = 0});
      module = make_part(llama_shapes(), 3);
    }
    const TrainingOptions options = options_of({.tensor = 2, .variant = kVariants[1]});
    const auto make = [&] { Training(rank.world(), *module, options); };
    EXPECT_SAYS(error_of<ConfigError>(make),
                "initialize: zero::Init has sharded parameter 'model.embed_tokens.weight'");
  });
}

TEST(SlicesAreRefused, InCheckpointsUntilTheyAreThere) {
  run_ranks(2, [](Rank& rank) {
    const auto module = make_part(llama_shapes(), 3);
    TrainingOptions options = options_of({.tensor = 2, .variant = kVariants[1]});
    options.config.checkpoint.async_save = true;
    Training training(rank.world(), *module, options);
    const auto expect = [](const std::string& text, const std::function<void()>& run) {
      EXPECT_SAYS(error_of<StateError>(run), text + " with tensor_parallel (autotp_size=2) is not there yet");
    };
    expect("save_checkpoint", [&] { (void)training.save("nowhere", {}); });
    expect("load_checkpoint", [&] { (void)training.load("nowhere", {}); });
    expect("save_16bit_model", [&] { training.export_weights("nowhere", {}); });
    training.destroy();
  });
}

}  // namespace
}  // namespace trireme::slices
