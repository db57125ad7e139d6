#include "optim/update.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "optim/adam.h"
#include "optim/lion.h"
#include "optim/low.h"
#include "trireme/base/error.h"
#include "trireme/device/stream.h"

namespace trireme {

namespace {

// 16-bit weights, other than Adam's with a master, are updated by blocks whose copies and temporaries stay in the
// second-level cache between conversion, update and rounding. A multiple of kAlignment, so that no block has a vector
// tail, which the kernels round differently.
constexpr int64_t kBlockNumel = int64_t{1} << 15;

at::Tensor slice_of(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return tensor.defined() ? tensor.narrow(0, begin, end - begin) : tensor;
}

/// `span.gradients` is fp32 here; `span.weights` is not looked at.
void update_master(const UpdateSpan& span, const OptimizerOptions& optimizer, double gradient_factor, int64_t step) {
  // The kernels divide by the scale and write the scaled gradients back, into memory that is spent after this step.
  std::optional<at::Tensor> scale;
  if (gradient_factor != 1) scale = at::scalar_tensor(1 / gradient_factor, at::kFloat);
  const at::TensorList none;
  switch (optimizer.kind) {
    case OptimizerKind::kSgd: {
      const at::TensorList momentum = optimizer.momentum != 0 ? at::TensorList(span.first) : none;
      at::_fused_sgd_(span.master, span.gradients, momentum, optimizer.weight_decay, optimizer.momentum, optimizer.lr,
                      /*dampening=*/0, optimizer.nesterov, /*maximize=*/false, /*is_first_step=*/step == 1, scale);
      return;
    }
    case OptimizerKind::kAdagrad: {
      const at::Tensor steps = at::scalar_tensor(static_cast<double>(step), at::kFloat);
      at::_fused_adagrad_(span.master, span.gradients, span.first, steps, optimizer.lr, /*lr_decay=*/0,
                          optimizer.weight_decay, optimizer.eps, /*maximize=*/false, scale);
      return;
    }
    case OptimizerKind::kLion:
      lion(span.master.data_ptr<float>(), span.gradients.const_data_ptr<float>(), span.first.data_ptr<float>(),
           span.master.numel(),
           {.lr = optimizer.lr,
            .beta1 = optimizer.beta1,
            .beta2 = optimizer.beta2,
            .weight_decay = optimizer.weight_decay,
            .gradient_factor = gradient_factor});
      return;
    case OptimizerKind::kLamb:
    case OptimizerKind::kMuon:
    case OptimizerKind::kClient:
      TRIREME_CHECK(false, optimizer_name(optimizer.kind), " is not updated range by range.");
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW: {
      const at::Tensor steps = at::scalar_tensor(static_cast<double>(step), at::kFloat);
      const auto run = [&](auto kernel) {
        kernel(span.master, span.gradients, span.first, span.second, none, steps, optimizer.lr, optimizer.beta1,
               optimizer.beta2, optimizer.weight_decay, optimizer.eps, /*amsgrad=*/false, /*maximize=*/false, scale,
               std::nullopt);
      };
      optimizer.kind == OptimizerKind::kAdamW ? run(at::_ops::_fused_adamw_::call) : run(at::_ops::_fused_adam_::call);
      return;
    }
  }
}

template <class Update>
void by_blocks(const UpdateSpan& span, const Update& update) {
  const int64_t numel = span.master.numel();
  const int64_t block_numel = is_host(span.master) ? kBlockNumel * at::get_num_threads() : numel;
  for (int64_t begin = 0; begin < numel; begin += block_numel)
    update(span.slice(begin, std::min(begin + block_numel, numel)));
}

/// In fp32, then each tensor that has changed is rounded once.
void update_rounded(const UpdateSpan& block, const OptimizerOptions& optimizer, double gradient_factor, int64_t step) {
  const auto widened = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(at::kFloat) : tensor; };
  UpdateSpan wide = block;
  for (at::Tensor* tensor : {&wide.master, &wide.gradients, &wide.first, &wide.second}) *tensor = widened(*tensor);
  update_master(wide, optimizer, gradient_factor, step);
  const auto round = [&](const at::Tensor& to, const at::Tensor& from, StochasticRounding::Tensor tensor) {
    if (to.defined()) block.rounding->round(to, from, block.begin, step, tensor);
  };
  round(block.master, wide.master, StochasticRounding::kWeights);
  round(block.first, wide.first, StochasticRounding::kFirst);
  round(block.second, wide.second, StochasticRounding::kSecond);
}

}  // namespace

UpdateSpan UpdateSpan::slice(int64_t begin, int64_t end) const {
  return {slice_of(master, begin, end), slice_of(weights, begin, end), slice_of(gradients, begin, end),
          slice_of(first, begin, end),  slice_of(second, begin, end),  rounding,
          this->begin + begin};
}

void update(const UpdateSpan& span, const OptimizerOptions& optimizer, double gradient_factor, int64_t step) {
  const at::NoGradGuard no_grad;
  if (span.is_low()) {
    by_blocks(span, [&](const UpdateSpan& block) {
      (block.rounding != nullptr ? update_rounded : update_low)(block, optimizer, gradient_factor, step);
    });
    return;
  }
  const bool widens = span.gradients.scalar_type() != at::kFloat;
  if (!span.has_master() && !widens) return update_master(span, optimizer, gradient_factor, step);
  const bool is_adam = optimizer.kind == OptimizerKind::kAdam || optimizer.kind == OptimizerKind::kAdamW;
  if (span.has_master() && is_adam) return adam_in_one_pass(span, optimizer, gradient_factor, step);

  by_blocks(span, [&](UpdateSpan block) {
    if (widens) block.gradients = block.gradients.to(at::kFloat);
    update_master(block, optimizer, gradient_factor, step);
    if (span.has_master()) block.weights.copy_(block.master);
  });
}

}  // namespace trireme
