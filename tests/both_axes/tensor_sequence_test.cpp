// Layers in slices and parts of sequences: one pass over both axes computes as one process.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "trireme/activations/axis_pass.h"
#include "trireme/base/error.h"
#include "trireme/sequence/sequence_parallel.h"
#include "trireme/tensor/tensor_parallel.h"

namespace trireme {
namespace {

constexpr int64_t kVocabulary = 24, kHidden = 16, kHeads = 4, kHeadSize = 4, kSamples = 2, kTokens = 11;
constexpr int kRanks = 2;  // along each axis

using Weights = std::map<std::string, at::Tensor>;
/// The dim of each weight that ranks along "tensor" have slices of.
using CutDims = std::map<std::string, int64_t>;
const CutDims kCutDims = {{"query", 0}, {"key", 0}, {"value", 0}, {"out", 1}, {"up", 0}, {"down", 1}};

Weights make_weights() {
  const at::Generator generator = at::detail::createCPUGenerator(5);
  const std::vector<std::pair<std::string, std::vector<int64_t>>> all = {
      {"tokens", {kVocabulary, kHidden}}, {"positions", {32, kHidden}},   {"norm", {kHidden}},
      {"query", {kHidden, kHidden}},      {"key", {kHidden, kHidden}},    {"value", {kHidden, kHidden}},
      {"out", {kHidden, kHidden}},        {"up", {3 * kHidden, kHidden}}, {"down", {kHidden, 3 * kHidden}}};
  Weights weights;
  for (const auto& [name, sizes] : all) weights[name] = at::randn(sizes, generator) * 0.3;
  return weights;
}

at::Tensor loss_of(const Weights& weights, const at::Tensor& ids, const at::Tensor& labels) {
  const auto heads = [&](const at::Tensor& x, const char* name) {
    return at::linear(x, weights.at(name)).view({x.size(0), x.size(1), kHeads, kHeadSize}).transpose(1, 2);
  };
  const at::Tensor positions = at::arange(ids.size(1));
  at::Tensor x = at::embedding(weights.at("tokens"), ids) + at::embedding(weights.at("positions"), positions);
  const at::Tensor normed = at::layer_norm(x, {kHidden}, weights.at("norm"));
  const at::Tensor attended = at::scaled_dot_product_attention(heads(normed, "query"), heads(normed, "key"),
                                                               heads(normed, "value"), {}, 0, /*is_causal=*/true);
  x = x + at::linear(attended.transpose(1, 2).reshape({x.size(0), x.size(1), kHidden}), weights.at("out"));
  x = x + at::linear(at::gelu(at::linear(x, weights.at("up"))), weights.at("down"));
  const at::Tensor logits = at::linear(x, weights.at("tokens"));
  return at::cross_entropy_loss(logits.flatten(0, 1), labels.flatten());
}

std::vector<at::Tensor> gradients(const at::Tensor& loss, const Weights& weights) {
  std::vector<at::Tensor> leaves;
  for (const auto& [name, weight] : weights) leaves.push_back(weight);
  return torch::autograd::grad({loss}, leaves);
}

void expect_one_process(SequenceAttention attention, const CutDims& cut_dims = kCutDims) {
  const at::Generator generator = at::detail::createCPUGenerator(9);
  const at::Tensor ids = at::randint(kVocabulary, {kSamples, kTokens}, generator, at::kLong);
  const at::Tensor labels = at::randint(kVocabulary, {kSamples, kTokens}, generator, at::kLong);
  labels.narrow(1, 0, 4).fill_(-100);
  Weights whole = make_weights();
  for (auto& [name, weight] : whole) weight.requires_grad_();
  const at::Tensor expected_loss = loss_of(whole, ids, labels);
  const std::vector<at::Tensor> expected = gradients(expected_loss, whole);
  run_ranks(kRanks * kRanks, [&](Rank& rank) {
    at::set_num_threads(1);
    const auto along_sequence = rank.world().split({{0, 2}, {1, 3}}, "sequence");
    const auto along_tensor = rank.world().split({{0, 1}, {2, 3}}, "tensor");
    std::vector<PassAxis> axes;
    axes.push_back(SequenceParallel::axis(*along_sequence, attention, 0));
    axes.push_back(TensorParallel::axis(*along_tensor, 1));
    const auto pass = std::make_shared<AxisPass>(PassOrder::kSequence, std::move(axes));
    SequenceParallel sequence(pass, 0);
    TensorParallel tensor(pass, 1);
    tensor.give_parts();
    Weights own = make_weights();
    for (auto& [name, weight] : own) {
      if (const auto cut = cut_dims.find(name); cut != cut_dims.end()) {
        const int64_t size = weight.size(cut->second), half = size / kRanks;
        std::vector<TensorPart> parts;
        for (int64_t other = 0; other < kRanks; ++other)
          parts.push_back({weight.sizes().vec(), static_cast<int>(cut->second), {{other * half, (other + 1) * half}}});
        weight = weight.chunk(kRanks, cut->second)[static_cast<size_t>(along_tensor->rank())].contiguous();
        tensor.add(weight.requires_grad_(), parts, false, name);
      } else {
        weight.requires_grad_();
      }
    }
    const SequenceInputs in = sequence.cut({.input_ids = ids, .labels = labels});
    EXPECT_NE(PartTensor::of(at::embedding(own.at("tokens"), in.input_ids)), nullptr);
    const at::Tensor loss = loss_of(own, in.input_ids, in.labels);
    sequence.check_loss(loss);
    tensor.check_loss(loss);
    const std::vector<at::Tensor> found = gradients(loss, own);
    EXPECT_NEAR(loss.item<double>(), expected_loss.item<double>(), 1e-5);
    size_t i = 0;
    for (const auto& [name, weight] : own) {
      at::Tensor gradient = found[i].contiguous(), truth = expected[i];
      ++i;
      along_sequence->all_reduce(gradient).wait();
      if (const auto cut = cut_dims.find(name); cut != cut_dims.end())
        truth = truth.chunk(kRanks, cut->second)[static_cast<size_t>(along_tensor->rank())];
      EXPECT_LE(((gradient / kRanks - truth).norm() / truth.norm()).item<double>(), 1e-5) << name;
    }
  });
}

TEST(TensorSequence, ABlockIsOneProcessUnderUlysses) { expect_one_process(SequenceAttention::kUlysses); }
TEST(TensorSequence, ABlockIsOneProcessInARing) { expect_one_process(SequenceAttention::kRing); }
TEST(TensorSequence, ABlockWhoseVocabularyIsCutIsOneProcess) {
  CutDims cut_dims = kCutDims;
  cut_dims["tokens"] = 0;
  for (const SequenceAttention attention : {SequenceAttention::kUlysses, SequenceAttention::kRing})
    expect_one_process(attention, cut_dims);
}

}  // namespace
}  // namespace trireme
