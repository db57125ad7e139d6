#include "trireme/precision/loss_scaling.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "trireme/base/error.h"

namespace trireme {

namespace {

class PassEnd {
 public:
  explicit PassEnd(std::shared_ptr<bool> pass) : pass_(std::move(pass)) {}
  ~PassEnd() { *pass_ = false; }
  PassEnd(const PassEnd&) = delete;
  PassEnd& operator=(const PassEnd&) = delete;

 private:
  std::shared_ptr<bool> pass_;
};

}  // namespace

LossScaling::LossScaling(const LossScaleOptions& options, LossScaleRule rule)
    : scaler_(options, rule), is_scaled_pass_(std::make_shared<bool>(false)) {}

at::Tensor LossScaling::scale(const at::Tensor& output, const at::Tensor& factor) const {
  const at::AutoGradMode with_graph(true);
  const at::Tensor wide = output.to(at::kFloat);
  const at::Tensor scaled = factor.defined() ? wide * factor : wide * scaler_.scale();
  // Runs before anything else of the pass. The pass as a whole is meant: gradients that a nested one produces
  // (recomputation) belong to it.
  scaled.register_hook([pass = is_scaled_pass_](const at::Tensor&) {
    *pass = true;
    // Autograd drops what it was to call at the end of a pass also where the pass throws.
    torch::autograd::Engine::get_default_engine().queue_callback([end = std::make_shared<PassEnd>(pass)] {});
  });
  return scaled;
}

void LossScaling::check_gradient() const {
  if (*is_scaled_pass_) return;
  throw StateError(
      str("Loss scaling is required for this configuration, and backward() came from a loss that was not "
          "scaled (the scale is ",
          scaler_.scale(), "): call engine.backward(loss), or engine.scale(loss).backward()"));
}

}  // namespace trireme
