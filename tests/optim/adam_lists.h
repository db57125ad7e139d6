// Stretches of memory that Adam updates, of the same random values each time.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>

#include <numeric>
#include <string>
#include <vector>

#include "optim/adam.h"
#include "optim/device_adam.h"

namespace trireme::testing {

/// Around the blocks of a launch and the elements that one thread has on their way, and none.
inline const std::vector<int64_t> kAdamSizes = {1, 0, 33, 1023, 1024, 1025, 8191, 8192, 8193, 3 * 8192 + 769, 40000};

/// Side by side in memory, so that what is written past the end of one is seen in the next.
inline AdamLists adam_lists(const std::vector<int64_t>& sizes, at::ScalarType weights, at::ScalarType gradients) {
  const at::Generator random = at::detail::createCPUGenerator(11);
  const int64_t numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const at::Tensor master = at::randn({numel}, random);
  const at::Tensor rounded = master.to(weights);
  const at::Tensor gradient = at::randn({numel}, random).to(gradients);
  const at::Tensor first = at::randn({numel}, random);
  const at::Tensor second = at::rand({numel}, random);
  AdamLists lists;
  int64_t begin = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    lists.masters.push_back(master.narrow(0, begin, sizes[i]));
    lists.weights.push_back(rounded.narrow(0, begin, sizes[i]));
    lists.gradients.push_back(gradient.narrow(0, begin, sizes[i]));
    lists.first.push_back(first.narrow(0, begin, sizes[i]));
    lists.second.push_back(second.narrow(0, begin, sizes[i]));
    lists.steps.push_back(at::full({}, static_cast<float>(i % 7 + 1)));
    begin += sizes[i];
  }
  return lists;
}

inline at::Tensor number(double value, c10::Device device = c10::Device(c10::kCPU)) {
  return at::full({}, static_cast<float>(value), at::TensorOptions().dtype(at::kFloat).device(device));
}

inline AdamLists to_device(AdamLists lists, c10::Device device) {
  for (auto* list : {&lists.masters, &lists.weights, &lists.gradients, &lists.first, &lists.second, &lists.steps})
    for (at::Tensor& tensor : *list) tensor = tensor.to(device);
  return lists;
}

/// What the host's own loops make of it.
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

/// The lists that differ in a bit; empty: none.
inline std::string difference(const AdamLists& a, const AdamLists& b) {
  std::string text;
  const auto compare = [&](const char* name, const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& y) {
    for (size_t i = 0; i < x.size(); ++i)
      if (!at::equal(x[i].cpu(), y[i].cpu())) text += std::string(name) + " " + std::to_string(i) + "\n";
  };
  compare("master", a.masters, b.masters);
  compare("weights", a.weights, b.weights);
  compare("first", a.first, b.first);
  compare("second", a.second, b.second);
  return text;
}

}  // namespace trireme::testing
