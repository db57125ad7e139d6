// Programs on slices of their weights, on ranks of one group, beside the same on one rank.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "trireme/base/tensor_part.h"
#include "trireme/tensor/tensor_parallel.h"

namespace trireme::sliced {

inline constexpr int64_t kBatch = 2, kLength = 5, kHidden = 24, kHeads = 6, kHeadSize = 4, kVocab = 18;

using Weights = std::map<std::string, at::Tensor>;

/// How a weight is cut: `dim` of `sections` equal matrices, in steps of `grain`.
struct Slicing {
  int dim;
  int64_t sections = 1, grain = 1;
  bool gathers_output = false;
  int64_t shared_by = 1;  ///< neighbouring ranks that have the same
};

struct Program {
  std::map<std::string, std::vector<int64_t>> shapes;
  std::map<std::string, Slicing> cuts;
  std::function<at::Tensor(const Weights&)> loss = {};
  double tolerance = 1e-5;
};

inline std::vector<TensorPart> parts_of(const std::vector<int64_t>& shape, const Slicing& slicing, int ranks) {
  const int64_t size = shape[static_cast<size_t>(slicing.dim)], section = size / slicing.sections;
  const int64_t units = section / slicing.grain, holders = ranks / slicing.shared_by;
  std::vector<TensorPart> parts;
  for (int rank = 0; rank < ranks; ++rank) {
    TensorPart part{.shape = shape, .dim = slicing.dim};
    const int64_t holder = rank / slicing.shared_by;
    for (int64_t i = 0; i < slicing.sections; ++i)
      part.intervals.push_back({i * section + units * holder / holders * slicing.grain,
                                i * section + units * (holder + 1) / holders * slicing.grain});
    parts.push_back(canonical(part));
  }
  return parts;
}

inline at::Tensor part_of(const at::Tensor& whole, const TensorPart& part) {
  if (part.dim < 0) return whole.clone();
  std::vector<at::Tensor> pieces;
  for (const Interval& one : part.intervals) pieces.push_back(whole.narrow(part.dim, one.begin, one.size()));
  return at::cat(pieces, part.dim);
}

inline Weights whole_weights(const Program& program) {
  const at::Generator generator = at::detail::createCPUGenerator(7);
  Weights weights;
  for (const auto& [name, shape] : program.shapes) weights[name] = at::randn(shape, generator) * 0.4;
  return weights;
}

struct Outcome {
  at::Tensor loss;
  Weights gradients;
};

inline Outcome train(const Program& program, Weights weights) {
  Outcome outcome;
  for (auto& [name, weight] : weights) weight.requires_grad_();
  const at::Tensor loss = program.loss(weights);
  torch::autograd::backward({loss}, {});
  for (auto& [name, weight] : weights)
    outcome.gradients[name] = weight.grad().defined() ? weight.grad() : at::zeros_like(weight);
  outcome.loss = loss.detach();
  return outcome;
}

inline double distance(const at::Tensor& actual, const at::Tensor& expected, const at::Tensor& whole) {
  if (actual.sizes() != expected.sizes()) return 1e9;
  return ((actual - expected).norm() / whole.norm().clamp_min(1e-6)).item<double>();
}

/// Losses and gradients on `ranks` ranks are those of one.
using Settings = std::vector<void (TensorParallel::*)()>;
inline void expect_same_by(const Program& program, int ranks, const Settings& settings) {
  const Outcome expected = train(program, whole_weights(program));
  std::mutex mutex;
  run_ranks(ranks, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    for (const auto setting : settings) (parallel.*setting)();
    Weights weights = whole_weights(program);
    std::map<std::string, TensorPart> own;
    for (auto& [name, weight] : weights) {
      const auto cut = program.cuts.find(name);
      if (cut == program.cuts.end()) continue;
      const auto parts = parts_of(program.shapes.at(name), cut->second, ranks);
      own[name] = parts[static_cast<size_t>(rank.id())];
      weight = part_of(weight, own[name]).contiguous();
      parallel.add(weight, parts, cut->second.gathers_output);
    }
    const Outcome actual = train(program, weights);
    const std::lock_guard lock(mutex);
    EXPECT_LT(distance(actual.loss, expected.loss, expected.loss), program.tolerance)
        << "rank " << rank.id() << " loss " << actual.loss << " expected " << expected.loss;
    for (const auto& [name, gradient] : actual.gradients) {
      const at::Tensor& whole = expected.gradients.at(name);
      const at::Tensor wanted = own.contains(name) ? part_of(whole, own[name]) : whole;
      EXPECT_LT(distance(gradient, wanted, whole), program.tolerance)
          << "rank " << rank.id() << ", gradient of " << name;
    }
  });
}

/// Both ways of telling a program of slices.
inline void expect_same(const Program& program, int ranks, Settings settings = {}) {
  expect_same_by(program, ranks, settings);
  SCOPED_TRACE("parts");
  settings.insert(settings.begin(), &TensorParallel::give_parts);
  expect_same_by(program, ranks, settings);
}

inline void expect_same(const Program& program) {
  for (const int ranks : {2, 3}) {
    SCOPED_TRACE("ranks " + std::to_string(ranks));
    expect_same(program, ranks);
    expect_same(program, ranks, {&TensorParallel::give_parts});
    expect_same(program, ranks, {&TensorParallel::give_parts, &TensorParallel::shard_tokens});
    expect_same(program, ranks, {&TensorParallel::overlap_sums});
  }
}

inline at::Tensor input(int64_t seed = 3) {
  return at::randn({kBatch, kLength, kHidden}, at::detail::createCPUGenerator(static_cast<uint64_t>(seed)));
}
inline at::Tensor tokens() {
  return at::randint(kVocab, {kBatch, kLength}, at::detail::createCPUGenerator(5), at::kLong);
}
inline at::Tensor squares(const at::Tensor& x) { return x.pow(2).sum(); }
inline at::Tensor heads_of(const at::Tensor& x) { return x.unflatten(-1, {-1, kHeadSize}).transpose(1, 2); }

}  // namespace trireme::sliced
