// Stretches of memory that Adam updates, of the same random values each time.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "optim/adam.h"
#include "optim/device_adam.h"

namespace trireme::testing {

/// Around the blocks of a launch and the elements that one thread has on their way, and none.
inline const std::vector<int64_t> kAdamSizes = {1, 0, 33, 1023, 1024, 1025, 8191, 8192, 8193, 3 * 8192 + 769, 40000};

/// An optimizer, the dtype of weights and that of gradients.
using AdamTypes = std::tuple<OptimizerKind, at::ScalarType, at::ScalarType>;

inline auto all_adam_types() {
  return ::testing::Combine(::testing::Values(OptimizerKind::kAdam, OptimizerKind::kAdamW),
                            ::testing::Values(at::kBFloat16, at::kHalf),
                            ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));
}
inline std::string adam_types_name(const ::testing::TestParamInfo<AdamTypes>& info) {
  const auto& [kind, weights, gradients] = info.param;
  return std::string(optimizer_name(kind)) + c10::toString(weights) + "By" + c10::toString(gradients);
}

/// Zeros, ties of rounding, what 16 bits cannot hold, and what is no number.
inline at::Tensor with_hard_values(const at::Tensor& values) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float hard[] = {0.F,           -0.F,          1e-40F,         -1e-40F,        6e-8F,
                        3e-8F,         65519.F,       65520.F,        70000.F,        -1e38F,
                        1 + 1 / 256.F, 1 + 3 / 256.F, 1 + 1 / 2048.F, 1 + 3 / 2048.F, kInfinity,
                        -kInfinity,    std::nanf("")};
  const auto count = std::min<int64_t>(std::size(hard), values.numel());
  for (int64_t i = 0; i < count; ++i) values.data_ptr<float>()[values.numel() - 1 - i] = hard[i];
  return values;
}

/// Side by side in memory of `device`, so that what is written past the end of one is seen in the next.
inline AdamLists adam_lists(const std::vector<int64_t>& sizes, at::ScalarType weights, at::ScalarType gradients,
                            c10::Device device = c10::Device(c10::kCPU)) {
  const at::Generator random = at::detail::createCPUGenerator(11);
  const int64_t numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const at::Tensor masters = with_hard_values(at::randn({numel}, random));
  const at::Tensor master = masters.to(device);
  const at::Tensor rounded = masters.to(weights).to(device);
  const at::Tensor gradient = with_hard_values(at::randn({numel}, random)).flip(0).to(gradients).to(device);
  const at::Tensor first = at::randn({numel}, random).to(device);
  const at::Tensor second = at::rand({numel}, random).to(device);
  AdamLists lists;
  int64_t begin = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    lists.masters.push_back(master.narrow(0, begin, sizes[i]));
    lists.weights.push_back(rounded.narrow(0, begin, sizes[i]));
    lists.gradients.push_back(gradient.narrow(0, begin, sizes[i]));
    lists.first.push_back(first.narrow(0, begin, sizes[i]));
    lists.second.push_back(second.narrow(0, begin, sizes[i]));
    lists.steps.push_back(at::full({}, i % 2 == 0 ? static_cast<float>(i + 1) : 20000.F).to(device));
    begin += sizes[i];
  }
  return lists;
}

inline at::Tensor number(double value, c10::Device device = c10::Device(c10::kCPU)) {
  return at::full({}, static_cast<float>(value), at::TensorOptions().dtype(at::kFloat).device(device));
}

/// The result of the host's own loops.
inline void adam_on_host(const AdamLists& lists, OptimizerOptions options, double gradient_factor) {
  options.lr = static_cast<float>(options.lr);  // as the device has it
  for (size_t i = 0; i < lists.masters.size(); ++i)
    adam_in_one_pass({.master = lists.masters[i],
                      .weights = lists.weights[i],
                      .gradients = lists.gradients[i],
                      .first = lists.first[i],
                      .second = lists.second[i]},
                     options, gradient_factor, lists.steps[i].item<int64_t>());
}

/// The lists that differ in a bit; empty: none. Processors have NaNs of other bits, and any is the same here.
inline std::string difference(const AdamLists& a, const AdamLists& b) {
  std::string text;
  const auto bits = [](const at::Tensor& values) {
    return values.cpu()
        .masked_fill(values.cpu().isnan(), std::nan(""))
        .view(values.element_size() == 2 ? at::kShort : at::kInt);
  };
  const auto compare = [&](const char* name, const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& y) {
    for (size_t i = 0; i < x.size(); ++i)
      if (!at::equal(bits(x[i]), bits(y[i]))) text += std::string(name) + " " + std::to_string(i) + "\n";
  };
  compare("master", a.masters, b.masters);
  compare("weights", a.weights, b.weights);
  compare("first", a.first, b.first);
  compare("second", a.second, b.second);
  return text;
}

}  // namespace trireme::testing
