#include "optim/device_update.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <optional>

#include "optim/device_adam.h"
#include "trireme/base/error.h"
#include "trireme/device/device.h"

namespace trireme {

namespace {

/// The operands of one multi-tensor kernel.
struct Lists {
  std::vector<at::Tensor> masters, gradients, first, second, steps;
};

Lists lists_of(const std::vector<DeviceRun>& runs) {
  Lists lists;
  for (const DeviceRun& run : runs) {
    lists.masters.push_back(run.span.master);
    lists.gradients.push_back(run.span.gradients.to(at::kFloat));
    if (run.span.first.defined()) lists.first.push_back(run.span.first);
    if (run.span.second.defined()) lists.second.push_back(run.span.second);
    lists.steps.push_back(run.step);
  }
  return lists;
}

void append(AdamLists& lists, const DeviceRun& run) {
  lists.masters.push_back(run.span.master);
  lists.weights.push_back(run.span.weights);
  lists.gradients.push_back(run.span.gradients);
  lists.first.push_back(run.span.first);
  lists.second.push_back(run.span.second);
  lists.steps.push_back(run.step);
}

/// Element-wise, as lion.h has it. What a skipped step computes may be NaN and is thrown away.
void lion_on_device(const DeviceRun& run, const OptimizerOptions& optimizer, const StepDecision& decision,
                    const at::Tensor& lr) {
  const UpdateSpan& span = run.span;
  at::Tensor gradients = span.gradients.to(at::kFloat);
  if (decision.gradient_factor.defined()) gradients = gradients * decision.gradient_factor;
  const at::Tensor sign = (span.first * optimizer.beta1 + gradients * (1 - optimizer.beta1)).sign();
  at::Tensor weights = span.master * (1 - lr * optimizer.weight_decay) - sign * lr;
  at::Tensor momentum = span.first * optimizer.beta2 + gradients * (1 - optimizer.beta2);
  if (decision.skip.defined()) {
    const at::Tensor applies = decision.skip.eq(0);
    weights = at::where(applies, weights, span.master);
    momentum = at::where(applies, momentum, span.first);
  }
  span.master.copy_(weights);
  span.first.copy_(momentum);
}

void update_masters(const std::vector<DeviceRun>& runs, const OptimizerOptions& optimizer, const StepDecision& decision,
                    const at::Tensor& lr) {
  if (runs.empty()) return;
  if (optimizer.kind == OptimizerKind::kLion) {
    for (const DeviceRun& run : runs) lion_on_device(run, optimizer, decision, lr);
    return;
  }
  Lists lists = lists_of(runs);
  // The kernels divide by the scale, and write back what comes of it.
  std::optional<at::Tensor> scale;
  if (decision.gradient_factor.defined()) scale = decision.gradient_factor.reciprocal();
  const std::optional<at::Tensor> skip = if_defined(decision.skip);
  const at::TensorList none;
  switch (optimizer.kind) {
    case OptimizerKind::kAdam:
      return at::_ops::_fused_adam__tensor_lr::call(lists.masters, lists.gradients, lists.first, lists.second, none,
                                                    lists.steps, lr, optimizer.beta1, optimizer.beta2,
                                                    optimizer.weight_decay, optimizer.eps, /*amsgrad=*/false,
                                                    /*maximize=*/false, scale, skip);
    case OptimizerKind::kAdamW:
      return at::_ops::_fused_adamw__tensor_lr::call(lists.masters, lists.gradients, lists.first, lists.second, none,
                                                     lists.steps, lr, optimizer.beta1, optimizer.beta2,
                                                     optimizer.weight_decay, optimizer.eps, /*amsgrad=*/false,
                                                     /*maximize=*/false, scale, skip);
    case OptimizerKind::kAdagrad:
      return at::_ops::_fused_adagrad__tensor_lr::call(lists.masters, lists.gradients, lists.first, lists.steps, lr,
                                                       /*lr_decay=*/0, optimizer.weight_decay, optimizer.eps,
                                                       /*maximize=*/false, scale, skip);
    case OptimizerKind::kSgd:
      // A momentum of zero is what the first step would set it to.
      // Another group may have momentum, and then all have room for it.
      return at::_ops::_fused_sgd__tensor_lr::call(
          lists.masters, lists.gradients, optimizer.momentum != 0 ? at::TensorList(lists.first) : none,
          optimizer.weight_decay, optimizer.momentum, lr, /*dampening=*/0, optimizer.nesterov,
          /*maximize=*/false, /*is_first_step=*/false, scale, skip);
    default:
      TRIREME_CHECK(false, optimizer_name(optimizer.kind), " has no kernels on a device");
  }
}

}  // namespace

bool is_adam(OptimizerKind kind) { return kind == OptimizerKind::kAdam || kind == OptimizerKind::kAdamW; }

bool is_on_devices(OptimizerKind kind) {
  return kind != OptimizerKind::kLamb && kind != OptimizerKind::kMuon && kind != OptimizerKind::kClient;
}

void update_on_device(const std::vector<DeviceRun>& runs, const OptimizerOptions& optimizer,
                      const StepDecision& decision, const at::Tensor& lr, bool by_adam_kernel) {
  by_adam_kernel &= is_adam(optimizer.kind);
  AdamLists in_one_pass;
  std::vector<DeviceRun> others;
  std::vector<at::Tensor> weights, masters;
  for (const DeviceRun& run : runs) {
    if (by_adam_kernel && run.span.has_master()) {
      append(in_one_pass, run);
      continue;
    }
    others.push_back(run);
    if (!run.span.has_master()) continue;
    weights.push_back(run.span.weights);
    masters.push_back(run.span.master);
  }
  if (!in_one_pass.masters.empty()) adam_on_device(in_one_pass, optimizer, lr, decision.gradient_factor, decision.skip);
  update_masters(others, optimizer, decision, lr);
  if (!weights.empty()) at::_foreach_copy_(weights, masters);
}

DeviceSteps::DeviceSteps(size_t parameters, c10::Device device)
    : counts_(at::zeros({static_cast<int64_t>(parameters)}, at::TensorOptions().dtype(at::kFloat).device(device))),
      histories_(parameters) {}

void DeviceSteps::begin(const std::vector<bool>& touched) {
  if (touched != touched_on_host_) {
    touched_on_host_ = touched;
    const at::Tensor flags = pinned_memory(counts_.numel(), at::kFloat, counts_.device());
    for (size_t i = 0; i < touched.size(); ++i) flags.data_ptr<float>()[i] = touched[i] ? 1 : 0;
    touched_ = flags.to(counts_.device(), /*non_blocking=*/true);
  }
  counts_.add_(touched_);
  ++updates_;
  for (size_t i = 0; i < touched.size(); ++i)
    if (touched[i])
      histories_[i] =
          static_cast<int64_t>(XXH3_64bits_withSeed(&updates_, sizeof(updates_), static_cast<uint64_t>(histories_[i])));
}

void DeviceSteps::end(const at::Tensor& skip) {
  if (skip.defined()) counts_.sub_(touched_ * skip);
}

void DeviceSteps::set(const std::vector<int64_t>& counts) {
  histories_ = counts;
  at::Tensor values = at::zeros({counts_.numel()}, at::kFloat);
  for (size_t i = 0; i < counts.size(); ++i) values.data_ptr<float>()[i] = static_cast<float>(counts[i]);
  counts_.copy_(values);
}

std::vector<int64_t> DeviceSteps::read() const {
  const at::Tensor values = counts_.cpu();
  const float* numbers = values.const_data_ptr<float>();
  return {numbers, numbers + values.numel()};
}

}  // namespace trireme
