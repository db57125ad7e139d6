// A small training loop on a pager alone: plain SGD on the owned slices, so that what is compared is the paging.
#pragma once

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/nn/module.h>

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/parameters.h"
#include "tests/support/run_ranks.h"
#include "tests/support/zero_stages.h"
#include "trireme/intercept.h"
#include "trireme/pager/pager.h"

namespace trireme::testing {

/// An accumulation window that has ended.
struct EndedWindow {
  std::vector<bool> touched;  ///< as ClosedWindow's
  std::vector<bool> written;
  double squares = 0;  ///< this rank's part
};

/// One SGD step on what is owned; parameters without a gradient are left alone.
inline EndedWindow sgd_step(Pager& pager, double lr) {
  at::NoGradGuard no_grad;
  ClosedWindow window = pager.close_window();
  const EndedWindow ended{window.touched(), window.written(), window.squares().total()};
  window.meet();
  for (const OwnedSlice& slice : pager.owned()) {
    for (const ParameterPlace& placement : pager.layout().units[slice.unit].parameters) {
      if (!ended.touched[placement.index]) continue;
      const int64_t begin = std::max(placement.begin, slice.begin);
      const int64_t end = std::min(placement.end(), slice.begin + slice.weights.numel());
      if (begin >= end) continue;
      at::Tensor weights = slice.weights.narrow(0, begin - slice.begin, end - begin);
      weights.sub_(slice.gradients.narrow(0, begin - slice.begin, end - begin).to(weights.scalar_type()).mul(lr));
    }
    window.publish(slice.unit);
  }
  window.open();
  return ended;
}

/// The sum of a number of each rank.
inline double sum_over(Group& group, double mine) {
  const at::Tensor sum = at::scalar_tensor(mine, at::kDouble);
  group.all_reduce(sum).wait();
  return sum.item<double>();
}

/// The turn of rank `rank` at step `step`.
struct Turn {
  int rank = 0;
  int step = 0;
};

/// A training program without its optimizer: `run` computes losses and calls backward for one rank and step.
template <class Net>
struct Program {
  std::function<Net()> make;
  std::function<void(Net&, const Turn&)> run;
  int steps = 3;
};

inline std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

/// One SGD step of plain libtorch: the mean over `nets`, which are the ranks' copies of one model, in rank order.
template <class Net>
void plain_sgd_step(std::vector<Net>& nets, double lr) {
  at::NoGradGuard no_grad;
  const size_t count = nets[0]->parameters().size();
  for (size_t i = 0; i < count; ++i) {
    at::Tensor sum;
    for (Net& net : nets) {
      const at::Tensor gradient = net->parameters()[i].grad();
      if (!gradient.defined()) continue;
      sum = sum.defined() ? sum + gradient : gradient.clone();
    }
    if (!sum.defined()) continue;
    for (Net& net : nets)
      net->parameters()[i].sub_((sum * static_cast<float>(1.0 / static_cast<double>(nets.size()))).mul(lr));
  }
  for (Net& net : nets) net->zero_grad(true);
}

template <class Net>
std::vector<at::Tensor> plain_weights(const Program<Net>& program, int ranks) {
  std::vector<Net> nets;
  for (int rank = 0; rank < ranks; ++rank) {
    manual_seed(3);
    nets.push_back(program.make());
  }
  for (int step = 0; step < program.steps; ++step) {
    for (int rank = 0; rank < ranks; ++rank) {
      manual_seed(100 * step + rank);
      program.run(nets[rank], {rank, step});
    }
    plain_sgd_step(nets, 0.1);
  }
  return copies_of(nets[0]->parameters());
}

template <class Net>
std::vector<at::Tensor> paged_weights(const Program<Net>& program, Rank& rank, const PagerPolicy& policy) {
  manual_seed(3);
  Net net = program.make();
  Pager pager(rank.world(), named_parameters_of(*net), policy);
  for (int step = 0; step < program.steps; ++step) {
    manual_seed(100 * step + rank.id());
    program.run(net, {rank.id(), step});
    pager.end_backward();
    sgd_step(pager, 0.1);
  }
  pager.restore();
  return copies_of(net->parameters());
}

/// How far weights may be apart: kBits where sums are folded in the same order, kRounding (of fp32) where they are not.
enum class Agreement { kBits, kRounding };

inline bool agree(const at::Tensor& a, const at::Tensor& b, Agreement agreement) {
  return agreement == Agreement::kBits ? at::equal(a, b) : at::allclose(a, b, 1e-5, 1e-6);
}

/// The program under `policy` ends with the weights that one process of plain libtorch gets.
template <class Net>
void expect_trains_like_one_process(const Program<Net>& program, const PagerPolicy& policy,
                                    Agreement agreement = Agreement::kBits, const std::vector<int>& worlds = {1, 2, 3},
                                    RankBackend backend = RankBackend::kThreads) {
  at::set_num_threads(1);
  for (const int ranks : worlds) {
    std::vector<at::Tensor> expected;
    run_ranks(1, [&](Rank&) { expected = plain_weights(program, ranks); });
    const auto train = [&](Rank& rank) {
      const std::vector<at::Tensor> got = paged_weights(program, rank, policy);
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(agree(got[i], expected[i], agreement))
            << "parameter " << i << " of rank " << rank.id() << " of " << ranks << ": "
            << (got[i] - expected[i]).abs().max().item<double>();
    };
    run_ranks(ranks, train, {.backend = backend});
  }
}

}  // namespace trireme::testing
