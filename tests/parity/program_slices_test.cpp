// Layers that a program has cut itself, over an axis "model": the engine shards, adds, clips and saves what each rank
// has of them.
#include <ATen/ops/cross_entropy_loss.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/json.h"
#include "trireme/engine/engine.h"

namespace trireme::program_slices {
namespace {

using testing::error_of;

constexpr int64_t kWords = 12, kWidth = 8, kInner = 16;
constexpr int kSamples = 4, kSteps = 3;

/// Megatron's two operators of a layer that is cut by outputs and one that is cut by inputs.
struct Enter : torch::autograd::Function<Enter> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& whole, int64_t group) {
    context->saved_data["group"] = group;
    return whole.view_as(whole);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          std::vector<at::Tensor> gradients) {
    at::Tensor sum = gradients[0].contiguous().clone();
    reinterpret_cast<Group*>(context->saved_data["group"].toInt())->all_reduce(sum).wait();
    return {sum, {}};
  }
};

struct Leave : torch::autograd::Function<Leave> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& part, int64_t group) {
    at::Tensor sum = part.contiguous().clone();
    reinterpret_cast<Group*>(group)->all_reduce(sum).wait();
    return sum;
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*, std::vector<at::Tensor> gradients) {
    return {gradients[0], {}};
  }
};

at::Tensor drawn(int64_t rows, int64_t columns, int seed) {
  at::Tensor values = at::arange(rows * columns, at::kFloat).mul_(0.7 + 0.1 * seed).sin_().mul_(0.4);
  return columns == 1 ? values : values.view({rows, columns});
}

/// An embedding, two layers of which ranks have slices, and a head.
struct Net : torch::nn::Module {
  explicit Net(Group* ranks)
      : group(ranks),
        embed(register_module("embed", torch::nn::Embedding(kWords, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, kInner / size()))),
        down(register_module("down", torch::nn::Linear(kInner / size(), kWidth))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        head(register_module("head", torch::nn::Linear(kWidth, kWords))) {
    const at::NoGradGuard no_grad;
    const int64_t inner = kInner / size(), first = rank() * inner;
    embed->weight.copy_(drawn(kWords, kWidth, 1));
    up->weight.copy_(drawn(kInner, kWidth, 2).narrow(0, first, inner));
    up->bias.copy_(drawn(kInner, 1, 3).narrow(0, first, inner));
    down->weight.copy_(drawn(kWidth, kInner, 4).narrow(1, first, inner));
    down->bias.copy_(drawn(kWidth, 1, 5));
    head->weight.copy_(drawn(kWords, kWidth, 6));
    head->bias.zero_();
  }
  int64_t size() const { return group != nullptr ? group->size() : 1; }
  int64_t rank() const { return group != nullptr ? group->rank() : 0; }

  at::Tensor loss(const at::Tensor& words) {
    const at::Tensor hidden = embed(words.slice(1, 0, -1));
    at::Tensor inner = hidden;
    if (group != nullptr && !forgets_to_add) inner = Enter::apply(inner, reinterpret_cast<int64_t>(group));
    inner = at::matmul(up(inner).relu(), down->weight.t());
    if (group != nullptr) inner = Leave::apply(inner, reinterpret_cast<int64_t>(group));
    const at::Tensor logits = head(norm(hidden + inner + down->bias));
    return at::cross_entropy_loss(logits.flatten(0, 1), words.slice(1, 1).flatten());
  }

  Group* group;
  bool forgets_to_add = false;  ///< gradients of what stands before the slices
  torch::nn::Embedding embed;
  torch::nn::Linear up, down;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};

const std::set<std::string> kSlices = {"up.weight", "up.bias", "down.weight"};

at::Tensor sample(int step, int index) {
  return at::arange(6, at::kLong).mul_(3 + index).add_(step * 5 + index).remainder(kWords).view({1, 6});
}

struct Layout {
  int data = 1, model = 1, stage = 0;
  std::string optimizer = "SGD";
  std::string gather = "auto";
  int replicas = 1;
  bool forgets_to_add = false;
  std::optional<std::set<std::string>> slices = kSlices;
  int ranks() const { return data * model; }
  Json config() const {
    Json json = {{"train_micro_batch_size_per_gpu", 1},
                 {"gradient_accumulation_steps", kSamples / data},
                 {"gradient_clipping", 0.2},
                 {"zero_optimization", {{"stage", stage}}},
                 {"trireme", {{"gather", gather}, {"merge_below_bytes", 0}}},
                 {"optimizer", {{"type", optimizer}, {"params", {{"lr", optimizer == "SGD" ? 0.5 : 0.01}}}}}};
    if (replicas > 1) json["zero_optimization"]["mics_shard_size"] = data / replicas;
    return json;
  }
};

struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> weights;  ///< whole ones
};

/// Where the dim of a slice lies in the whole.
int64_t dim_of(const std::string& name) { return name == "down.weight" ? 1 : 0; }

void take_weights(Net& net, Group* model, std::map<std::string, at::Tensor>& weights) {
  for (const auto& item : net.named_parameters()) {
    at::Tensor own = item.value().detach().clone();
    if (model != nullptr && kSlices.contains(item.key())) {
      std::vector<at::Tensor> parts;
      const at::Tensor all = at::empty({model->size() * own.numel()}, own.options());
      model->all_gather(all, own.flatten()).wait();
      for (const at::Tensor& part : all.chunk(model->size())) parts.push_back(part.view(own.sizes()));
      own = at::cat(parts, dim_of(item.key()));
    }
    weights[item.key()] = own;
  }
}

/// Steps [from, to) of a run of `layout`; loads `load` first, where it is named, and saves into `save`.
Outcome train(const Layout& layout, int from = 0, int to = kSteps, const std::filesystem::path& load = {},
              const std::filesystem::path& save = {}) {
  Outcome outcome;
  std::mutex mutex;
  run_ranks(layout.ranks(), [&](Rank& rank) {
    at::set_num_threads(1);
    const Degrees degrees{.model = layout.model};
    const Grid grid(rank.world(), topology_of({.data = layout.data, .model = layout.model}, rank.size()));
    Group* const model = layout.model > 1 ? &grid.along({"model"}) : nullptr;
    Net net(model);
    net.forgets_to_add = layout.forgets_to_add;
    Engine engine(rank.world(), net,
                  {.config = config_from_json(layout.config(), rank.size(), degrees), .own_slices = layout.slices});
    if (!load.empty()) {
      EXPECT_TRUE(engine.load_checkpoint(load));
    }
    std::vector<double> losses, norms;
    for (int step = from; step < to; ++step) {
      double sum = 0;
      for (int micro = 0; micro < kSamples / layout.data; ++micro) {
        ForwardScope scope = engine.begin_forward();
        const at::Tensor loss = net.loss(sample(step, engine.data_place().rank * kSamples / layout.data + micro));
        sum += engine.backward(loss).item<double>();
        engine.step();
      }
      const at::Tensor mean = at::full({1}, sum, at::kDouble);
      engine.group().all_reduce(mean).wait();
      losses.push_back(mean.item<double>() / layout.data);
      norms.push_back(engine.get_global_grad_norm().value());
    }
    if (!save.empty()) engine.save_checkpoint(save);
    engine.destroy();
    std::map<std::string, at::Tensor> weights;
    take_weights(net, model, weights);
    const std::lock_guard lock(mutex);
    if (rank.id() == rank.size() - 1) outcome = {std::move(losses), std::move(norms), std::move(weights)};
  });
  return outcome;
}

void expect_same(const Outcome& got, const Outcome& expected, double tolerance = 1e-6) {
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i) {
    EXPECT_NEAR(got.losses[i], expected.losses[i], tolerance * expected.losses[i]) << "step " << i;
    EXPECT_NEAR(got.norms[i], expected.norms[i], 2 * tolerance * expected.norms[i]) << "step " << i;
  }
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (const auto& [name, weight] : expected.weights)
    EXPECT_LE((got.weights.at(name) - weight).norm().item<double>(), tolerance * weight.norm().item<double>() + 1e-7)
        << name;
}

TEST(ProgramSlices, TrainAsOneProcess) {
  const Outcome expected = train({});
  for (const int data : {1, 2})
    for (const int stage : {0, 1, 2, 3})
      for (const char* gather : {"shared", "copy"}) {
        if (stage < 3 && gather == std::string("copy")) continue;
        SCOPED_TRACE(str("data ", data, ", ZeRO ", stage, ", ", gather));
        expect_same(train({.data = data, .model = 2, .stage = stage, .gather = gather}), expected);
      }
}

TEST(ProgramSlices, OnFourRanksWithAdamW) {
  expect_same(train({.model = 4, .stage = 1, .optimizer = "AdamW"}), train({.optimizer = "AdamW"}), 2e-6);
}

TEST(ProgramSlices, BesideReplicas) {
  expect_same(train({.data = 4, .model = 2, .stage = 3, .replicas = 2}), train({}));
}

TEST(ProgramSlices, GoOnFromACheckpointAtAnotherStageAndNumberOfDataRanks) {
  const testing::TemporaryFolder folder;
  const Layout saved{.data = 2, .model = 2, .stage = 3, .optimizer = "AdamW"};
  train(saved, 0, 2, {}, folder / "saved");
  const Layout other{.data = 1, .model = 2, .stage = 1, .optimizer = "AdamW"};
  const Outcome rest = train(other, 2, 3, folder / "saved"), all = train({.optimizer = "AdamW"});
  expect_same(rest, {{all.losses[2]}, {all.norms[2]}, all.weights}, 2e-6);
  EXPECT_SAYS(error_of([&] { train({.model = 4, .optimizer = "AdamW"}, 2, 3, folder / "saved"); }), "[2, ");
}

TEST(ProgramSlices, AreNamedByTheProgram) {
  Layout layout{.model = 2};
  layout.slices.reset();
  EXPECT_SAYS(error_of([&] { train(layout); }), "the axis \"model\" has 2 ranks, and nothing says which parameters");
  layout.slices = {"up.weight", "up.bias"};
  EXPECT_SAYS(error_of([&] { train(layout); }), "initialize: parameter 'down.weight' has other values on rank 1");
  layout.slices = {"up.weight", "up.bias", "down.weight", "left"};
  EXPECT_SAYS(error_of([&] { train(layout); }), "own_slices: the module has no parameter 'left'");
}

TEST(ProgramSlices, AreShownToHaveTheSameGradientsOfTheRest) {
  EXPECT_SAYS(error_of([] { train({.data = 2, .model = 2, .stage = 2, .forgets_to_add = true}); }),
              "on the axis \"model\", have the same elements of \"embed.weight\" and other gradients");
}

TEST(ProgramSlices, ThatAreWholeAreFoundByTheirGradients) {
  Layout layout{.data = 2, .model = 2, .stage = 1};
  layout.slices->insert("head.weight");
  EXPECT_SAYS(error_of([&] { train(layout); }), "have the same gradient of \"head.weight\", which own_slices names");
}

TEST(ProgramSlices, RefuseWhatNeedsWholeParameters) {
  EXPECT_SAYS(error_of([] { train({.model = 2, .optimizer = "Lamb"}); }), "optimizer Lamb looks at whole parameters");
  run_ranks(2, [](Rank& rank) {
    Net net(&rank.world());
    Engine engine(rank.world(), net,
                  {.config = config_from_json(Layout{.model = 2}.config(), 2, {.model = 2}), .own_slices = kSlices});
    EXPECT_SAYS(error_of([&] { engine.save_16bit_model("/nowhere"); }), "the program has cut its layers itself");
  });
}

}  // namespace
}  // namespace trireme::program_slices
