// Counts of what stages send each other in a step, as closed forms: a boundary costs a value and its gradient.
#include <gtest/gtest.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>

#include "tests/ownership/stages.h"

namespace trireme::testing {
namespace counts {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int64_t kBatch = 3, kWidth = 8, kTokens = 5, kWords = 11;

/// Layers "0", "1", …, of which each stage has as many as the others.
struct Mlp : nn::Module {
  explicit Mlp(int count) {
    for (int i = 0; i < count; ++i) layers.push_back(register_module(std::to_string(i), nn::Linear(kWidth, kWidth)));
  }
  std::vector<nn::Linear> layers;
};
OwnedProgram mlp(int stages) {
  auto net = std::make_shared<Mlp>(2 * stages);
  return {net, [](const std::string& name) { return (name[0] - '0') / 2; },
          [net](const Tensors& in, const OwnedProgram::Backward& backward) {
            Tensor x = in[0];
            for (nn::Linear& layer : net->layers) x = torch::tanh(layer->forward(x));
            const Tensor loss = F::mse_loss(x, in[0]);
            backward(loss);
            return Tensors{loss};
          },
          [](int m) {
            return Tensors{torch::full({kBatch, kWidth}, 0.1 * (m + 1))};
          }};
}

/// A block of GPT: attention with a mask that every stage makes, and a feed-forward network.
struct Block : nn::Module {
  nn::LayerNorm n1{register_module("n1", nn::LayerNorm(nn::LayerNormOptions({kWidth})))};
  nn::LayerNorm n2{register_module("n2", nn::LayerNorm(nn::LayerNormOptions({kWidth})))};
  nn::Linear qkv{register_module("qkv", nn::Linear(kWidth, 3 * kWidth))};
  nn::Linear out{register_module("out", nn::Linear(kWidth, kWidth))};
  nn::Linear up{register_module("up", nn::Linear(kWidth, 2 * kWidth))};
  nn::Linear down{register_module("down", nn::Linear(2 * kWidth, kWidth))};

  Tensor forward(const Tensor& x, const Tensor& mask) {
    const auto parts = qkv(n1(x)).view({kBatch, kTokens, 3, 2, kWidth / 2}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor scores = torch::matmul(parts[0], parts[1].transpose(-1, -2)) * 0.5 + mask;
    const Tensor mixed = torch::matmul(torch::dropout(scores.softmax(-1), 0.1, true), parts[2]);
    const Tensor h = x + out(mixed.transpose(1, 2).reshape({kBatch, kTokens, kWidth}));
    return h + down(torch::gelu(up(n2(h))));
  }
};
struct Gpt : nn::Module {
  explicit Gpt(int count) {
    for (int i = 0; i < count; ++i) blocks.push_back(register_module(std::to_string(i), std::make_shared<Block>()));
  }
  nn::Embedding words{register_module("words", nn::Embedding(kWords, kWidth))};
  nn::Embedding places{register_module("places", nn::Embedding(kTokens, kWidth))};
  std::vector<std::shared_ptr<Block>> blocks;
  nn::LayerNorm norm{register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})))};
  nn::Linear head{register_module("head", nn::Linear(kWidth, kWords))};
};
OwnedProgram gpt(int stages) {
  auto net = std::make_shared<Gpt>(stages);
  return {net,
          [=](const std::string& name) {
            if (name.starts_with("words") || name.starts_with("places")) return 0;
            return name.starts_with("norm") || name.starts_with("head") ? stages - 1 : name[0] - '0';
          },
          [net](const Tensors& in, const OwnedProgram::Backward& backward) {
            Tensor x = net->words(in[0]) + net->places(torch::arange(kTokens));
            const Tensor mask = torch::full({kTokens, kTokens}, -1e9).triu(1);
            for (const auto& block : net->blocks) x = block->forward(x, mask);
            const Tensor loss = F::cross_entropy(net->head(net->norm(x)).flatten(0, 1), in[0].flatten());
            backward(loss);
            return Tensors{loss};
          },
          [](int m) {
            return Tensors{torch::arange(kBatch * kTokens).add(m).remainder(kWords).view({kBatch, kTokens})};
          }};
}

/// Messages, their bytes, and waits for sizes of a stage in a step.
struct Counts {
  int64_t messages, bytes, told;
  bool operator==(const Counts&) const = default;
};
void PrintTo(const Counts& counts, std::ostream* out) {
  *out << counts.messages << " messages of " << counts.bytes << " bytes, " << counts.told << " waits for sizes";
}

/// The third step of each stage; the sizes of results were told before.
std::vector<Counts> of_third_step(OwnedProgram (*make)(int), int stages, int micro_batches,
                                  const std::string& schedule) {
  std::vector<Counts> counts;
  for (const OwnershipCounters& of_stage :
       run_over_stages([=] { return make(stages); }, stages, micro_batches, schedule, 3).last_step)
    counts.push_back({of_stage.messages, of_stage.bytes, of_stage.told});
  return counts;
}

/// A path through the stages in order: for each micro-batch one value of `activation` bytes to the next stage and its
/// gradient back, an end to every other stage, and a returned loss of the last one to every other.
std::vector<Counts> expected(int stages, int micro_batches, int64_t activation) {
  std::vector<Counts> counts;
  for (int stage = 0; stage < stages; ++stage) {
    const bool is_first = stage == 0, is_last = stage == stages - 1;
    const int64_t activations = (is_last ? 0 : 1) + (is_first ? 0 : 1), others = stages - 1;
    const int64_t losses = is_last ? others : 0, loss = sizeof(float);
    counts.push_back({micro_batches * (activations + others + losses),
                      micro_batches * (activations * activation + losses * loss), 0});
  }
  return counts;
}

TEST(Counts, OfAStepAreClosedForms) {
  constexpr int kMicroBatches = 3;
  for (const int stages : {2, 3})
    for (const std::string schedule : {"sequential", "gpipe", "1f1b"}) {
      EXPECT_EQ(of_third_step(mlp, stages, kMicroBatches, schedule),
                expected(stages, kMicroBatches, kBatch * kWidth * sizeof(float)))
          << "an MLP on " << stages << " stages by " << schedule;
      EXPECT_EQ(of_third_step(gpt, stages, kMicroBatches, schedule),
                expected(stages, kMicroBatches, kBatch * kTokens * kWidth * sizeof(float)))
          << "a small GPT on " << stages << " stages by " << schedule;
    }
}

TEST(Counts, SizesAreToldInTheFirstStepAlone) {
  const auto told = [](int steps) {
    return run_over_stages([] { return mlp(2); }, 2, 4, "sequential", steps).last_step[0].told;
  };
  EXPECT_GT(told(1), 0);
  EXPECT_EQ(told(2), 0);
}

}  // namespace counts
}  // namespace trireme::testing
