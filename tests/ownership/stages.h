// Programs over stages and in one process, to be compared bit by bit.
#pragma once

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/ownership/ownership.h"

namespace trireme::testing {

/// A model, its homes, and what a step does with one micro-batch.
struct OwnedProgram {
  std::shared_ptr<torch::nn::Module> model;
  std::function<int(const std::string& name)> stage_of;  ///< of a parameter or buffer
  /// Calls `backward` with what backward begins from, and returns results. `inputs`: of the micro-batch.
  using Backward = std::function<void(const at::Tensor& root)>;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs, const Backward& backward)> step;
  std::function<std::vector<at::Tensor>(int micro_batch)> inputs;
};
using MakeProgram = std::function<OwnedProgram()>;

struct StepResult {
  std::vector<std::vector<at::Tensor>> outputs;               ///< by micro-batch
  std::vector<std::pair<std::string, at::Tensor>> gradients;  ///< undefined: none
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  std::vector<int> visits;                   ///< of the last micro-batch
  bool comes_back = false;                   ///< any micro-batch, see ForwardFacts
  std::vector<OwnershipCounters> last_step;  ///< by stage: messages, bytes and waits for sizes that it added
};

/// One pass of a stage over a micro-batch.
struct StagePass {
  bool is_forward;
  int micro_batch;
};

/// The order of a stage's passes: "sequential", "gpipe" or "1f1b".
inline std::vector<StagePass> passes_of(const std::string& schedule, int stages, int stage, int micro_batches) {
  std::vector<StagePass> passes;
  const int ahead = schedule == "sequential" ? 1
                    : schedule == "gpipe"    ? micro_batches
                                             : std::min(stages - stage, micro_batches);
  for (int forward = 0, backward = 0; backward < micro_batches;) {
    if (forward < micro_batches && forward - backward < ahead)
      passes.push_back({true, forward++});
    else
      passes.push_back({false, backward++});
  }
  return passes;
}

/// `steps` steps over `stages` stages as threads; gradients are added up. What is of a stage comes from it.
inline StepResult run_over_stages(const MakeProgram& make, int stages, int micro_batches, const std::string& schedule,
                                  int steps = 2) {
  StepResult result;
  result.outputs.resize(static_cast<size_t>(steps) * micro_batches);
  result.last_step.resize(stages);
  std::mutex mutex;
  std::map<std::string, at::Tensor> gradients, buffers;
  run_ranks(stages, [&](Rank& rank) {
    Ownership ownership(rank.world(), c10::kCPU);
    const OwnedProgram program = make();
    const auto each = [&](const auto& visit) {
      for (const auto& item : program.model->named_parameters()) visit(item.key(), item.value(), true);
      for (const auto& item : program.model->named_buffers()) visit(item.key(), item.value(), false);
    };
    const auto stage_of = [&](const std::string& name) { return stages == 1 ? 0 : program.stage_of(name); };
    each([&](const std::string& name, const at::Tensor& tensor, bool) { ownership.own(tensor, stage_of(name), name); });
    std::vector<std::shared_ptr<Ownership::MicroBatch>> open(micro_batches);
    for (int step = 0; step < steps; ++step) {
      const OwnershipCounters before = ownership.counters();
      for (const StagePass& pass : passes_of(schedule, stages, rank.id(), micro_batches)) {
        auto& micro_batch = open[pass.micro_batch];
        if (pass.is_forward) {
          micro_batch = ownership.begin(step * micro_batches + pass.micro_batch, 1234,
                                        schedule != "sequential" ? ForwardOrder::kAhead : ForwardOrder::kOneByOne);
          const Ownership::Scope forward(ownership, *micro_batch);
          const auto outputs =
              program.step(program.inputs(pass.micro_batch), [&](const at::Tensor& root) { ownership.backward(root); });
          ownership.end_forward(outputs);
          continue;
        }
        for (int piece = ownership.pieces(*micro_batch) - 1; piece >= 0; --piece) {
          const Ownership::Roots roots = ownership.receive_gradients(*micro_batch, piece);
          if (!roots.edges.empty())
            torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, false, false, true);
          ownership.send_gradients(*micro_batch, piece);
        }
      }
      for (int m = 0; m < micro_batches; ++m) {
        const auto outputs = ownership.outputs(*open[m]);
        if (rank.id() == stages - 1) result.outputs[static_cast<size_t>(step) * micro_batches + m] = outputs;
        const ForwardFacts facts = ownership.facts(*open[m]);
        if (rank.id() == 0) result.visits = facts.visits;
        if (rank.id() == 0) result.comes_back = result.comes_back || facts.comes_back;
        open[m].reset();
      }
      ownership.finish();
      OwnershipCounters& added = result.last_step[rank.id()] = ownership.counters();
      added.messages -= before.messages;
      added.bytes -= before.bytes;
      added.told -= before.told;
    }
    const std::lock_guard lock(mutex);
    each([&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
      if (stage_of(name) != rank.id()) return;
      if (is_parameter)
        gradients[name] = tensor.grad();
      else
        buffers[name] = tensor;
    });
  });
  result.gradients.assign(gradients.begin(), gradients.end());
  result.buffers.assign(buffers.begin(), buffers.end());
  return result;
}

/// "" where losses, gradients and buffers have the same bits, or are as near as `tolerance`; else the first that
/// differs.
inline std::string first_difference(const StepResult& one, const StepResult& other, double tolerance = 0) {
  const auto differ = [&](const at::Tensor& a, const at::Tensor& b) {
    if (a.defined() != b.defined()) return true;
    return a.defined() && !(tolerance > 0 ? at::allclose(a, b, tolerance, tolerance) : at::equal(a, b));
  };
  const auto by = [](const at::Tensor& a, const at::Tensor& b) {
    return a.defined() && b.defined()
               ? str(", by ", (a - b).abs().max().item<double>(), " of ", b.abs().max().item<double>())
               : std::string(", which one of them has");
  };
  if (one.outputs.size() != other.outputs.size()) return "another number of outputs";
  for (size_t m = 0; m < one.outputs.size(); ++m)
    for (size_t i = 0; i < one.outputs[m].size(); ++i)
      if (differ(one.outputs[m][i], other.outputs[m].at(i)))
        return str("output ", i, " of micro-batch ", m, ": ", one.outputs[m][i].sum().item<double>(), " and ",
                   other.outputs[m][i].sum().item<double>());
  for (const auto& [kind, ours, theirs] :
       {std::tuple("gradient", &one.gradients, &other.gradients), std::tuple("buffer", &one.buffers, &other.buffers)}) {
    if (ours->size() != theirs->size()) return str("another number of ", kind, "s");
    for (size_t i = 0; i < ours->size(); ++i)
      if (differ((*ours)[i].second, (*theirs)[i].second))
        return str(kind, " of ", (*ours)[i].first, by((*ours)[i].second, (*theirs)[i].second));
  }
  return "";
}

}  // namespace trireme::testing
