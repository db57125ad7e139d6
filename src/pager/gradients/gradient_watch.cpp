#include "pager/gradients/gradient_watch.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "trireme/base/error_hook.h"

namespace trireme {

namespace {

class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(const std::function<void(int)>& accept, int parameter) : accept_(accept), parameter_(parameter) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    run_below_libtorch([this] { accept_(parameter_); });
    return outputs;
  }

 private:
  const std::function<void(int)>& accept_;
  const int parameter_;
};

}  // namespace

void GradientWatch::add(const at::Tensor& parameter, int index) {
  auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
  const uintptr_t hook = accumulator->add_post_hook(std::make_unique<GradientHook>(accept_, index));
  watched_.push_back({std::move(accumulator), hook});
}

void GradientWatch::end() {
  for (Watched& watched : watched_) watched.accumulator->del_post_hook(watched.hook);
  watched_.clear();
}

at::Tensor flat_gradient(const at::Tensor& parameter, at::Tensor gradient) {
  if (gradient.is_sparse()) gradient = gradient.to_dense();
  if (gradient.scalar_type() != parameter.scalar_type()) gradient = gradient.to(parameter.scalar_type());
  if (gradient.strides() != parameter.strides() || !gradient.is_non_overlapping_and_dense()) {
    at::Tensor ordered = at::empty_strided(parameter.sizes(), parameter.strides(), gradient.options());
    gradient = ordered.copy_(gradient);
  }
  return gradient.as_strided({gradient.numel()}, {1});
}

}  // namespace trireme
